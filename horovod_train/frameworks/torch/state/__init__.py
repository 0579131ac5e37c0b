"""Weights, buffers and optimizer state of a rank, whole or sharded, as arrays of a checkpoint."""
