"""Horovod: building it, checking it, and the world it makes."""
