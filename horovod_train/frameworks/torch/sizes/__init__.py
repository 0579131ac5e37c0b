"""Estimates of memory and FLOPs, and the modules that are sharded or recomputed as units."""
