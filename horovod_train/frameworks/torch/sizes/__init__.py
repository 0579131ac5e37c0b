"""Estimates of memory and FLOPs, and selection of the modules that are sharded or recomputed as units."""
