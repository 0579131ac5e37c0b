"""What PyTorch raises when a GPU has too little memory or has failed, in words that help."""

from __future__ import annotations

import re

import torch

from horovod_train.config.schema import Job
from horovod_train.errors import DeviceMemoryError, GpuError, HorovodTrainError

# What the driver says, and what it means. The kernel's log has it as an XID of NVIDIA's.
FAULTS = {
    "ecc": "its memory has failed (ECC; XID 48, 63, 64 or 94): reset or replace the GPU",
    "fallen off the bus": "it does not answer any more (XID 79): power, or the slot",
    "nvlink": "a link between GPUs has failed (XID 74)",
    "device-side assert": "a kernel has refused its input, such as a label that is out of range: with "
    "train.device: cpu, or CUDA_LAUNCH_BLOCKING=1 in launch.env, it is seen where",
    "illegal memory access": "a kernel has read what is not its own: CUDA_LAUNCH_BLOCKING=1 in launch.env "
    "shows which",
    "unspecified launch failure": "a kernel or the GPU has failed",
    "out of memory": "another process has the memory",
}
WANTED = re.compile(r"Tried to allocate ([\d.]+ \w+)")


def device_error(error: BaseException, job: Job, rank: int) -> HorovodTrainError | None:
    """Return our error for one of a device; None: it is of something else.

    Args:
        error: What was raised.
        job: Says what can be changed.
        rank: Of this process.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return _out_of_memory(str(error), job, rank)
    text = str(error)
    if not isinstance(error, RuntimeError) or "CUDA error" not in text:
        return None
    reasons = (reason for sign, reason in FAULTS.items() if sign in text.lower())
    reason = next(reasons, "the GPU or its driver has failed")
    first_line = text.splitlines()[0]
    return GpuError(
        f"rank {rank}'s GPU: {first_line}: {reason}",
        hint="look for XID in the kernel's log (`dmesg | grep -i xid`), and at `nvidia-smi -q -d ECC`",
    )


def _out_of_memory(text: str, job: Job, rank: int) -> DeviceMemoryError:
    peak_bytes, total_bytes = torch.cuda.max_memory_allocated(), _total_bytes()
    wanted = WANTED.search(text)
    message = (
        f"rank {rank}'s GPU is out of memory: tensors took {_gib(peak_bytes)} at most, of "
        f"{_gib(total_bytes)}" + (f", and {wanted[1]} more were wanted" if wanted else "")
    )
    return DeviceMemoryError(message, hint="; ".join(what_to_change(job)))


def what_to_change(job: Job) -> list[str]:
    """Return what makes a step smaller, the cheapest first."""
    train = job.train
    changes = []
    if train.batch_size_per_rank > 1:
        half = train.batch_size_per_rank // 2
        changes.append(
            f"set train.batch_size_per_rank: {half} and train.accumulation_steps: "
            f"{2 * train.accumulation_steps} (the same global batch in smaller pieces)"
        )
    if train.precision == "fp32":
        changes.append("train.precision: bf16 halves the activations")
    if not train.activation_checkpointing:
        changes.append("train.activation_checkpointing computes them anew instead of keeping them")
    changes.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in launch.env, where sizes change")
    return changes


def _total_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
