"""Monitoring of jobs from the events of runs and the metrics of ranks. Imports no framework."""
