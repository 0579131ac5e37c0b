"""Launcher of jobs on Kubernetes through the MPI operator."""
