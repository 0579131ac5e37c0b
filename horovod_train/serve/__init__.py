"""HTTP server: web page, job API, Prometheus targets and job metrics."""
