"""The learning rate as a pure function."""
