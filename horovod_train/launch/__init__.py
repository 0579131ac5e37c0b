"""Launchers of jobs, and supervision of the ranks that they start."""
