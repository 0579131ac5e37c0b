"""Checkpoints: files, folders, retention, and selection of the checkpoint to resume from."""
