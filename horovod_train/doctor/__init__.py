"""Examination of hosts, clusters and networks, to check whether jobs can run."""
