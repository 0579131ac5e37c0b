"""Comparison of a strategy's steps with the steps of the plain model."""
