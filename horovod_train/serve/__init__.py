"""Servers: the page, Prometheus targets and metrics of jobs."""
