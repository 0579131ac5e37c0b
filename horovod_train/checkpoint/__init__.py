"""Checkpoints: files, folders, which to keep and which to resume."""
