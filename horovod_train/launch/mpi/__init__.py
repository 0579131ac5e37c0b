"""Process managers of MPI libraries: how each starts ranks, one file each."""
