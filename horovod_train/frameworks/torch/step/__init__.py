"""A training step: forward, backward, loss, update, and the outcome."""
