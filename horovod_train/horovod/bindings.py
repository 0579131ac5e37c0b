"""Horovod's bindings, and counters of the engine.

    Binding                  a binding
    allreduce_counters       bytes and time of all-reduces on CPUs (patch 0017)
    gpu_allreduce_counters   bytes and time of all-reduces on GPUs (patch 0021)

Horovod has a library of its own for each of three frameworks.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from horovod_train.horovod.cuda import torch_build


@dataclass(frozen=True)
class Binding:
    """A binding.

    Attributes:
        distributions: Alternative packages that provide the framework.
        variable: Name of the framework in the variables of Horovod's build, such as ``HOROVOD_WITH_...``.
        sum_of_ones: Statements that set ``total`` to the sum of three ones over ranks, with the binding as
            ``hvd``.
    """

    distributions: tuple[str, ...]
    variable: str
    sum_of_ones: str


BINDINGS: Mapping[str, Binding] = {
    "torch": Binding(
        ("torch",),
        "PYTORCH",
        'import torch; total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="check")',
    ),
    "tensorflow": Binding(
        ("tensorflow", "tensorflow-cpu"),
        "TENSORFLOW",
        "import tensorflow as tf; total = hvd.allreduce(tf.ones(3), op=hvd.Sum).numpy()",
    ),
    "mxnet": Binding(
        ("mxnet",),
        "MXNET",
        "import mxnet as mx; total = hvd.allreduce(mx.nd.ones(3), average=False).asnumpy()",
    ),
}


def framework_version(name: str) -> str | None:
    """Return the version of an installed framework; of PyTorch with its local version (2.13.0+cu130)."""
    if name == "torch":
        torch = torch_build()
        return None if torch is None else torch.version
    for distribution in BINDINGS[name].distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


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
