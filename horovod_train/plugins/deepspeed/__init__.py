"""Strategy ``deepspeed``: DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import StringConstraints, model_validator

from horovod_train.config.fields import Section
from horovod_train.config.support import JobSizes, MemoryEstimate, Refused, StrategySupport
from horovod_train.frameworks.torch.strategies import (
    NO_FP16,
    NO_GRAPHS,
    NO_RANDOMNESS_BY_SAMPLE,
    no_compression,
    no_noise_scale,
)
from horovod_train.frameworks.torch.strategies.fsdp import sharded

DEEPSPEED_BYTES = 90 * 2**20
"""Additional memory of a process for DeepSpeed: its import, and its allocations and deallocations."""


class Arguments(Section):
    """Arguments of DeepSpeed's ZeRO."""

    stage: Literal[1, 2, 3] = 3
    """1: shard optimizer state; 2: also gradients; 3: also weights."""

    offload_optimizer: Literal["cpu", "nvme"] | None = None
    """cpu: store and update optimizer state in host memory; nvme: store it on a disk."""

    offload_parameters: Literal["cpu"] | None = None
    """With stage 3: store weights that are not in use in host memory."""

    nvme_path: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Folder on a disk, for nvme."""

    zero_optimization: dict[str, Any] = {}
    """Further settings of DeepSpeed's section of that name."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        both = sorted(self.zero_optimization.keys() & {"stage", "offload_optimizer", "offload_param"})
        if both:
            raise ValueError(f"zero_optimization: {both[0]} is a separate field: set that one")
        if self.offload_parameters is not None and self.stage != 3:
            raise ValueError(f"offload_parameters needs stage: 3, and this is stage: {self.stage}")
        on_disk = self.offload_optimizer == "nvme"
        if on_disk and self.stage != 3:
            raise ValueError(f"nvme needs stage: 3, and this is stage: {self.stage}")
        if on_disk != (self.nvme_path is not None):
            raise ValueError("nvme_path and offload_optimizer: nvme require each other")
        return self


def memory(job: JobSizes) -> Mapping[str, MemoryEstimate]:
    """Return the memory for stage 3: as for fsdp, plus persistent gradients, which the update copies."""
    sizes, num_ranks = job.whole, job.num_ranks
    need = sharded(job, gathered=sizes.gathered, order=50)
    gradients = sizes.trained / num_ranks
    resident = need.weights + need.optimizer + gradients
    in_passes = need.peak - sizes.gradients_by_then / num_ranks + gradients + job.bucket
    peak = max(in_passes, resident + gradients + sizes.update / num_ranks)
    process = max(peak, sizes.weights) + sizes.process + DEEPSPEED_BYTES
    return {"": replace(need, peak=peak, process=process)}


SUPPORT = StrategySupport(
    f"{__name__}.strategy:DeepSpeed",
    Arguments,
    (
        *no_compression("DeepSpeed reduces uncompressed gradients"),
        NO_GRAPHS,
        Refused("train.compile", "DeepSpeed calls the model, and has hooks in it", "leave it out"),
        NO_FP16,
        Refused("train.channels_last", "weights are gathered as contiguous tensors", "leave it out"),
        *no_noise_scale("DeepSpeed reduces gradients during the backward pass"),
        NO_RANDOMNESS_BY_SAMPLE,
        Refused("optimizer.schedules", "DeepSpeed updates with its own optimizer", "leave it out"),
    ),
    is_verified=True,
    saves_memory=True,
    memory=memory,
)
