"""MPI in addition to Horovod, through mpi4py."""

from __future__ import annotations

from types import ModuleType


def mpi() -> ModuleType:
    """Import and return mpi4py's ``MPI``; the import initializes MPI, unless Horovod has done so already."""
    from mpi4py import MPI

    return MPI
