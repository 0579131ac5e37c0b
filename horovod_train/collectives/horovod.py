"""The communicator over one of Horovod's bindings, and errors of CUDA and NCCL.

    connect                      the communicator of this process's ranks
    HorovodCommunicator          base class of the communicators of the bindings
    translated                   this package's error for an exception of a collective
    explain_cuda, explain_nccl   this package's errors for the error messages of CUDA and NCCL

Each binding has its own core, background thread and connections, so a process uses a single binding for all
communication: gradients and messages.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from horovod_train.collectives.base import CollectiveLog, Communicator, SingleRank, Waiting
from horovod_train.config.schema import Job
from horovod_train.errors import (
    DeviceMemoryError,
    EngineError,
    GpuError,
    HorovodTrainError,
    KernelError,
    NcclError,
    PeerError,
    UserError,
    WorldError,
)
from horovod_train.horovod.bindings import allreduce_counters, gpu_allreduce_counters
from horovod_train.horovod.environment import horovod_settings
from horovod_train.horovod.mpi import refuse_other_launchers, require_world, started_as_one_of_many
from horovod_train.system.processes import PREEMPTION_SIGNALS, preserved_handlers

KERNEL_LOG_HINT = "look for XID in the kernel's log (`dmesg | grep -i xid`), and at `nvidia-smi -q -d ECC`"
BLOCKING_LAUNCH_HINT = "CUDA_LAUNCH_BLOCKING=1 in launch.env shows where"


@dataclass(frozen=True)
class Fault:
    """Meaning of an error message of CUDA.

    Attributes:
        substrings: Substrings in lower case; the fault applies if the message contains one of them.
        kind: Class of the error that this package raises.
        meaning: Cause of the message, for the user.
        hint: Action for the user.
    """

    substrings: tuple[str, ...]
    kind: type[HorovodTrainError]
    meaning: str
    hint: str = KERNEL_LOG_HINT


# The first fault with a matching sign applies. XIDs are NVIDIA's error numbers in the log of the kernel.
FAULTS = (
    Fault(
        ("device-side assert",),
        KernelError,
        "a kernel has refused its input, such as a label or an index that is out of range",
        f"train.device: cpu, or {BLOCKING_LAUNCH_HINT}",
    ),
    Fault(
        ("out of memory", "status_alloc_failed"),
        DeviceMemoryError,
        "out of memory outside of PyTorch's allocator (NCCL buffers, CUDA context)",
        "`nvidia-smi` shows the processes that use it; otherwise reduce train.batch_size_per_rank",
    ),
    Fault(
        ("no kernel image",),
        UserError,
        "this PyTorch has no kernels for it: it is too old or too new",
        "install a PyTorch that is built for this GPU (`torch.cuda.get_arch_list()` names them)",
    ),
    Fault(
        ("driver version is insufficient", "driver on your system is too old"),
        GpuError,
        "its driver is older than this PyTorch's CUDA needs (CUDA 13.0: 580, CUDA 12: 525)",
        "update the driver, or install a PyTorch for an older CUDA, and build the engine again",
    ),
    Fault(("ecc",), GpuError, "its memory has failed (XID 48, 63, 64, 94 or 95): reset or replace the GPU"),
    Fault(("nvlink",), GpuError, "a link between GPUs has failed (XID 74)"),
    Fault(
        ("illegal memory access", "misaligned address"),
        GpuError,
        "a kernel has accessed an address that is not allocated (XID 13 or 31): an error in a kernel, "
        "or the GPU",
        f"{BLOCKING_LAUNCH_HINT}; {KERNEL_LOG_HINT}",
    ),
    Fault(
        ("unspecified launch failure", "unknown error", "unavailable", "fallen off the bus"),
        GpuError,
        "a kernel or the GPU has failed (XID 79: the GPU fell off the bus: check power supply and PCIe slot)",
    ),
    Fault(("",), GpuError, "the GPU or its driver has failed"),
)
IS_OUT_OF_MEMORY = re.compile(r"can't allocate memory|std::bad_alloc")
IS_CUDA = re.compile(
    r"CUDA (driver )?error: |cuDNN error: |\bcuda\w+ failed: |driver on your system is too old"
)

# Likely causes of NCCL's error messages, by a substring in lower case; the first match applies.
NCCL_REASONS = {
    "duplicate gpu": "several ranks use one GPU: start one rank per GPU, or set launch.share_gpus: true",
    "dev/shm": "shared memory is too small: `docker run --shm-size 1g`, or launch.kubernetes.shm_size",
    "out of memory": "its buffers do not fit in addition to the model: lower train.batch_size_per_rank",
    "driver version is insufficient": "the driver is too old for this NCCL: update it",
    "unhandled system error": "ranks do not reach each other: set launch.network_interface",
    "unhandled cuda error": "the driver is too old for this NCCL, or a GPU has failed: see `nvidia-smi`",
    "version mismatch": "ranks have different NCCLs: install the same PyTorch on all hosts",
}
# NCCL reports this both for a rank that has exited and for a link that has failed.
NCCL_CONSEQUENCE = "remote process exited"


def explain_cuda(text: str, rank: int) -> HorovodTrainError | None:
    """Return this package's error for a message of CUDA; None: it is not from CUDA.

    PyTorch raises these messages ("CUDA error: ..."), and so does Horovod, for its own CUDA calls
    ("cudaEventRecord failed: ...") and for NCCL. A GPU runs asynchronously, so that the call that reports a
    failure is seldom the call that caused it.
    """
    if not IS_CUDA.search(text):
        return None
    first_line = text.splitlines()[0]
    fault = next(f for f in FAULTS if any(sign in text.lower() for sign in f.substrings))
    return fault.kind(f"rank {rank}'s GPU: {first_line}: {fault.meaning}", hint=fault.hint)


def explain_nccl(text: str, where: str) -> NcclError | PeerError | None:
    """Return this package's error for a message of NCCL from a collective; None: it is not from NCCL."""
    lowered = text.lower()
    if "nccl" not in lowered:
        return None
    if NCCL_CONSEQUENCE in lowered:
        error = PeerError(f"GPUs cannot exchange data any more, in {where}: {text}")
        error.cause = NcclError.cause
        return error
    reasons = (reason for sign, reason in NCCL_REASONS.items() if sign in lowered)
    likely = next(reasons, "see the log of NCCL")
    return NcclError(
        f"GPUs cannot exchange data, in {where}: {text}",
        hint=f"{likely}. Set NCCL_DEBUG=INFO in launch.env to see more",
    )


Result = TypeVar("Result")
Array = npt.NDArray[np.generic]


class HorovodCommunicator:
    """The communicator of Horovod's ranks. A subclass implements the collectives on arrays of its binding.

    Args:
        settings: Environment variables that Horovod reads when it starts. Variables that are already set
            have precedence.

    Raises:
        EngineError: Horovod is missing or cannot start.
    """

    BINDING = ""

    def __init__(self, settings: Mapping[str, str]) -> None:
        for variable, value in settings.items():
            os.environ.setdefault(variable, value)
        try:
            self.hvd: Any = importlib.import_module(f"horovod.{self.BINDING}")
            exceptions: Any = importlib.import_module("horovod.common.exceptions")
        except ImportError as error:
            raise EngineError(
                f"this process was started as one of several ranks, but Horovod for {self.BINDING} is "
                f"missing: {error}",
                hint="run `horovod-train engine build`, then `horovod-train engine check`",
            ) from error
        self.lost: tuple[type[Exception], ...] = (exceptions.HorovodInternalError,)
        try:
            with preserved_handlers(PREEMPTION_SIGNALS):
                self.hvd.init()
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"Horovod cannot start: {error}", hint="run `horovod-train engine check` on this host"
            ) from error
        self.rank: int = self.hvd.rank()
        self.size: int = self.hvd.size()
        self.local_rank: int = self.hvd.local_rank()
        self.host = socket.gethostname()
        self.waiting_since_s: float | None = None
        """Start time of the current wait of this rank (``monotonic``); None: not waiting."""
        self.waiting_in: Waiting | None = None
        """The collective or device work that this rank waits for."""
        self.log = CollectiveLog()
        """The last collectives of this rank."""
        self.at_close = ExitStack()
        """Callbacks of ``close``."""

    def allreduce_sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum over ranks, in double precision."""
        name = "horovod_train.allreduce_sum"
        array = np.array(values, np.float64)
        total = self.call(lambda: self.allreduce_array(array, name), name, array.nbytes)
        result: list[float] = total.tolist()
        return result

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in the order of ranks."""
        framed = np.frombuffer(struct.pack("<q", len(data)) + data, np.uint8)
        name = "horovod_train.allgather"
        everything = self.call(lambda: self.allgather_arrays(framed, name), name, framed.nbytes).tobytes()
        pieces, at = [], 0
        for _ in range(self.size):
            (length,) = struct.unpack_from("<q", everything, at)
            pieces.append(everything[at + 8 : at + 8 + length])
            at += 8 + length
        return pieces

    def allreduce_array(self, array: Array, name: str) -> Array:
        """Return the elementwise sum over ranks; float32, float64 or an integer type."""
        raise NotImplementedError

    def allgather_arrays(self, array: Array, name: str) -> Array:
        """Return the concatenated arrays of all ranks, in the order of ranks; each has shape [any]."""
        raise NotImplementedError

    @staticmethod
    def allreduce_counters() -> tuple[int, float] | None:
        """Return bytes and seconds of all-reduces so far; None: the engine does not count them."""
        return allreduce_counters()

    @staticmethod
    def gpu_allreduce_counters() -> tuple[int, float] | None:
        """Return bytes and seconds of all-reduces on this rank's GPU so far; None: not counted."""
        return gpu_allreduce_counters()

    def close(self) -> None:
        """Shut down communication. Safe to call twice."""
        self.at_close.close()
        if self.hvd.is_initialized():
            self.hvd.shutdown()

    def call(self, collective: Callable[[], Result], name: str, size_bytes: int) -> Result:
        """Call and log a blocking collective; ``size_bytes`` is the size of this rank's input.

        Raises:
            PeerError: Another rank was lost.
            WorldError: Shapes or types of the input differ between ranks.
            HorovodTrainError: NCCL or CUDA has failed.
        """
        entry = self.log.begin(name, size_bytes)
        result = self.wait_in(entry, collective)
        entry.ended_s = monotonic()
        return result

    def wait_in(self, entry: Waiting, blocking: Callable[[], Result]) -> Result:
        """Call a blocking function, and record the wait and its start time. Raises as ``call`` does."""
        self.waiting_in, self.waiting_since_s = entry, monotonic()
        try:
            return blocking()
        except self.lost as error:
            raise translated(error, entry, self.rank) from error
        finally:
            self.waiting_since_s = self.waiting_in = None


def translated(error: Exception, entry: Waiting, rank: int) -> HorovodTrainError:
    """Return this package's error for an exception that a collective of a rank raised."""
    message = str(error)
    if "mismatched" in message.lower():
        return WorldError(
            f"shape or type of a collective's input differs between ranks: {error}",
            hint="models and code must be the same on every rank",
        )
    gone = PeerError(f"a collective failed because another rank exited, in {entry}: {error}")
    if IS_OUT_OF_MEMORY.search(message):  # the engine allocates the results of collectives in its own thread
        return DeviceMemoryError(
            f"rank {rank} is out of memory, in {entry}: {message.splitlines()[0]}",
            hint="`horovod-train plan JOB --memory` says what a rank needs under each strategy",
        )
    return explain_nccl(message, str(entry)) or explain_cuda(message, rank) or gone


def connect(
    communicator_class: type[HorovodCommunicator],
    job: Job | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Communicator:
    """Return the communicator of this process's ranks; without a launcher, a ``SingleRank``.

    Args:
        communicator_class: Class of the binding.
        job: Job with the settings of Horovod; None: default settings.
        environ: Environment variables, among them those of launchers.

    Raises:
        EngineError: The process was started as one of several ranks, and Horovod is missing or cannot start.
        UserError: A launcher that Horovod does not support has started several processes.
    """
    if not started_as_one_of_many(environ):
        require_world(environ, 1)
        return SingleRank()
    refuse_other_launchers(environ)
    job = job or Job(name="library", task="own:Loop")
    settings = horovod_settings(job)
    if job.launch.threads_per_rank is not None:
        settings["OMP_NUM_THREADS"] = str(job.launch.threads_per_rank)  # else the ranks may share all cores
    world = communicator_class(settings)
    require_world(environ, world.size)
    return world
