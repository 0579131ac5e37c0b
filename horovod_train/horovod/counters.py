"""Counters of the engine: bytes and time of all-reduces on CPUs (patch 0017) and GPUs (patch 0021)."""

from __future__ import annotations

import ctypes
import sys

from horovod_train.horovod.bindings import BINDINGS


def allreduce_counters() -> tuple[int, float] | None:
    """Return the bytes that this process has passed to all-reduces on CPUs, and their time in seconds.

    The time of an all-reduce starts when all ranks are ready: waiting for ranks is excluded. None: no binding
    is loaded, or the engine does not count.
    """
    return _read("horovod_allreduce_bytes", "horovod_allreduce_microseconds")


def gpu_allreduce_counters() -> tuple[int, float] | None:
    """Return the bytes and the time in seconds of this process's NCCL all-reduces; None: unknown.

    The time of an all-reduce starts when this rank's data is ready. It includes waiting for other ranks,
    because a GPU cannot detect when they are ready.
    """
    return _read("horovod_gpu_allreduce_bytes", "horovod_gpu_allreduce_microseconds")


def _read(bytes_name: str, microseconds_name: str) -> tuple[int, float] | None:
    size_bytes, microseconds, is_known = 0, 0, False
    for binding in BINDINGS:  # each binding has its own core library; a process usually loads one of them
        module = sys.modules.get(f"horovod.{binding}.mpi_ops")
        library = getattr(getattr(module, "_basics", None), "MPI_LIB_CTYPES", None)
        if library is None:
            continue
        try:
            counters = [getattr(library, bytes_name), getattr(library, microseconds_name)]
        except AttributeError:
            continue
        for counter in counters:
            counter.restype = ctypes.c_longlong
        size_bytes += counters[0]()
        microseconds += counters[1]()
        is_known = True
    return (size_bytes, microseconds / 1e6) if is_known else None
