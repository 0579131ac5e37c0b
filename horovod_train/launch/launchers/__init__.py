"""Launchers, which convert a job into a command, a batch script or a manifest."""
