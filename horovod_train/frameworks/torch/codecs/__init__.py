"""Gradient codecs of PyTorch jobs, one module per codec."""
