"""Weights, buffers and optimizer state of a rank, whole or sharded, and their arrays in a checkpoint."""
