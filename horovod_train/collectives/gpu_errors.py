"""Errors of this package for the error messages of CUDA and NCCL.

PyTorch raises these messages ("CUDA error: ..."), and so does Horovod, for its own CUDA calls
("cudaEventRecord failed: ...") and for NCCL. A GPU runs asynchronously, so that the call that reports a
failure is seldom the call that caused it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from horovod_train.errors import (
    DeviceMemoryError,
    GpuError,
    HorovodTrainError,
    KernelError,
    NcclError,
    PeerError,
    UserError,
)

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
    """Return this package's error for a message of CUDA; None: it is not from CUDA."""
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
