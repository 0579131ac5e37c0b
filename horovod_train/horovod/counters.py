"""What the engine itself has counted: bytes and time of all-reduces on CPUs (patch 0017) and GPUs (0021)."""

from __future__ import annotations

import ctypes
import sys

BINDINGS = ("torch", "tensorflow", "mxnet")


def allreduce_counters() -> tuple[int, float] | None:
    """Return the bytes that this process has given to all-reduces so far, and how long these took in seconds.

    From the moment that all ranks were ready: the wait for them is excluded. None: no binding is loaded,
    or the engine does not count.
    """
    return _read("horovod_allreduce_bytes", "horovod_allreduce_microseconds")


def gpu_allreduce_counters() -> tuple[int, float] | None:
    """Return the same of all-reduces on this process's GPU, through NCCL.

    From the moment that this rank's data was ready: a GPU does not see when others are, and waiting for them
    is part of it.
    """
    return _read("horovod_gpu_allreduce_bytes", "horovod_gpu_allreduce_microseconds")


def _read(bytes_name: str, microseconds_name: str) -> tuple[int, float] | None:
    size_bytes, microseconds, is_known = 0, 0, False
    for binding in BINDINGS:  # each has its own core; a process uses one of them
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
