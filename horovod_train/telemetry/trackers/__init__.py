"""Experiment trackers, which store losses and metrics of runs: one module per tracker."""
