"""A model that is spread over ranks by its layers: how it is cut, and how micro-batches pass through it."""
