"""HTTP servers of the web page, of Prometheus targets and of job metrics."""
