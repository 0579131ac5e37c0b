"""Where losses and metrics of a run go besides Prometheus: a file per tracker."""
