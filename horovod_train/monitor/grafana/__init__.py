"""Grafana's dashboards: what they show (Python), and the files that are made of it (JSON, shipped)."""
