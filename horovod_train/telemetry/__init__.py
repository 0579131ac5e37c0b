"""Prometheus metrics of a rank."""
