"""Checks before and during training."""
