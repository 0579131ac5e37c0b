"""MPI beside Horovod, through mpi4py."""

from __future__ import annotations

from types import ModuleType


def mpi() -> ModuleType:
    """Import and return mpi4py's ``MPI``. Importing it starts MPI, unless Horovod has started it already."""
    from mpi4py import MPI

    return MPI
