"""The loop, its state, and what hooks into it."""
