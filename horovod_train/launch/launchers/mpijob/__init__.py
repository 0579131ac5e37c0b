"""Jobs on Kubernetes, through the MPI operator."""
