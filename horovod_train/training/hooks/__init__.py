"""Hooks of the training loop, one file for each subject."""
