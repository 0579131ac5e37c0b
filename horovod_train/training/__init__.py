"""The training loop, its state, and its hooks."""
