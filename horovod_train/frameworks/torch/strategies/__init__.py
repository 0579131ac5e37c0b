"""Parallelism strategies of PyTorch jobs, one module or subpackage per strategy."""
