"""The GPU of this rank, for frameworks based on PyTorch.

TorchBased     GPU and random generators of a rank
device_error   errors for exhausted memory and failed GPUs, with hints on settings of the job
"""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping

import torch

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.horovod import explain_cuda
from horovod_train.config.schema import Job
from horovod_train.config.support import strategy_support
from horovod_train.errors import DeviceMemoryError, HorovodTrainError
from horovod_train.frameworks.devices import gpu_uuid
from horovod_train.frameworks.torch.state import rank_state

HOST_OUT_OF_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
WANTED = re.compile(r"Tried to allocate ([\d.]+ \w+)")


def device_error(error: BaseException, job: Job, rank: int) -> HorovodTrainError | None:
    """Return this package's error for exhausted memory or a failed GPU; None: the error has another cause."""
    if isinstance(error, torch.OutOfMemoryError):
        return _out_of_memory(str(error), job, rank)
    if isinstance(error, MemoryError) or HOST_OUT_OF_MEMORY.search(str(error)):
        return _out_of_host_memory(str(error), job, rank)
    found = explain_cuda(str(error), rank) if isinstance(error, RuntimeError) else None
    if isinstance(found, DeviceMemoryError):
        return DeviceMemoryError(found.message, hint="; ".join([found.hint, *what_to_change(job)]))
    return found


def _out_of_memory(text: str, job: Job, rank: int) -> DeviceMemoryError:
    peak_bytes, total_bytes = torch.cuda.max_memory_allocated(), _total_bytes()
    wanted = WANTED.search(text)
    message = (
        f"rank {rank}'s GPU is out of memory: peak of tensors {_gib(peak_bytes)} of "
        f"{_gib(total_bytes)}" + (f", failed request {wanted[1]}" if wanted else "")
    )
    return DeviceMemoryError(message, hint="; ".join(what_to_change(job)))


def _out_of_host_memory(text: str, job: Job, rank: int) -> DeviceMemoryError:
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    limit_bytes = min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)
    wanted = HOST_OUT_OF_MEMORY.search(text)
    message = f"rank {rank} is out of memory: its process took {_gib(peak_bytes)} at most"
    if limit_bytes is not None:
        message += f", its limit (ulimit -d, -v) is {_gib(limit_bytes)}"
    if wanted is not None:
        message += f", and {_gib(int(wanted[1]))} more were wanted"
    return DeviceMemoryError(message, hint="; ".join(what_to_change(job, is_gpu=False)))


def what_to_change(job: Job, *, is_gpu: bool = True) -> list[str]:
    """Return the changes of a job that reduce the memory of a step, the cheapest first."""
    train = job.train
    changes = []
    if (pieces := _smallest_divisor(train.batch_size_per_rank)) > 1:
        changes.append(
            f"set train.batch_size_per_rank: {train.batch_size_per_rank // pieces} and "
            f"train.accumulation_steps: {pieces * train.accumulation_steps} (the same global batch in "
            "pieces; batch normalization sees the pieces)"
        )
    if train.precision == "fp32":
        changes.append("train.precision: bf16 halves the activations")
    if not train.activation_checkpointing:
        changes.append("train.activation_checkpointing recomputes them instead of keeping them")
    if train.cuda_graph:
        changes.append("train.cuda_graph: false: graphs keep additional memory")
    if job.allreduce.wire_dtype != "fp32":
        changes.append("allreduce.wire_dtype: fp32: without a second copy of the gradients")
    if job.framework == "torch" and not strategy_support(job.strategy.name).saves_memory:
        changes.append(
            "strategy: zero shares the optimizer's state among ranks, fsdp the weights as well: "
            "`horovod-train plan JOB --memory` says what a rank needs under each"
        )
    if not is_gpu:
        return changes
    changes.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in launch.env, where sizes change")
    return changes


def _smallest_divisor(number: int) -> int:
    return next((d for d in range(2, number + 1) if number % d == 0), 1)


def _total_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


class TorchBased:
    """Base class of frameworks based on PyTorch: GPU and random generators of a rank."""

    def gpu_uuid(self) -> str:
        """Return the UUID of this rank's GPU; empty: it has none."""
        return gpu_uuid(torch.cuda.current_device()) if torch.cuda.is_available() else ""

    def device_memory(self) -> tuple[int, int | None, int] | None:
        """Return the allocated, reserved and peak allocated GPU memory, in bytes; None: there is no GPU."""
        if not torch.cuda.is_available():
            return None
        return (
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            torch.cuda.max_memory_allocated(),
        )

    def explain(self, error: Exception, job: Job, rank: int) -> HorovodTrainError | None:
        """Return this package's error for a device error; None: it is another error."""
        return device_error(error, job, rank)

    def rng_state(self) -> tuple[object, Mapping[str, ArrayBlob]]:
        """Return the state of all random generators."""
        return rank_state.rng_state()

    def load_rng_state(self, tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
        """Load the state of all random generators."""
        rank_state.load_rng_state(tree, arrays)

    def seed(self, seed: int, rank: int, epoch: int) -> None:
        """Seed all random generators of this rank."""
        rank_state.seed_generators(seed, rank, epoch)
