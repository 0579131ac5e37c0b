"""HTTP server: web page, job API, Prometheus targets and job metrics."""

PAGE_PORT = 9301
"""Default port of the page."""

TARGETS_PORT = 9300
"""Default port of Prometheus targets without the page."""
