"""Comparison of a strategy's steps with those of the plain model."""
