"""Grafana dashboards: their definitions in Python, and the JSON files generated from them (shipped/)."""
