"""Strategy ``pipeline``: pipeline parallelism."""
