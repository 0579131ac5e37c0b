"""Execution and measurement of unchanged training scripts that do not use this package."""
