"""Strategy ``fsdp``: PyTorch's fully_shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from horovod_train.config.fields import Count, Section
from horovod_train.config.support import JobSizes, MemoryEstimate, Refused, StrategySupport, estimate
from horovod_train.frameworks.torch.strategies import (
    NO_FP16,
    REFUSED_WITH_PYTORCH_SUMS,
    Pattern,
    no_noise_scale,
)

DType = Literal["fp32", "bf16", "fp16"]


class Arguments(Section):
    """Arguments of PyTorch's fully_shard."""

    units: list[Pattern] | None = None
    """Name patterns of modules, each of which is one unit, such as ``layers.*``; null: the model's layers."""

    param_dtype: DType | None = None
    """Data type of gathered weights; null: that of the parameters."""

    reduce_dtype: DType | None = None
    """Data type of gradients in the reduce-scatter; null: that of gathered weights."""

    reshard_after_forward: bool = True
    """Free a unit after its forward pass, and gather it again for backward."""

    reduce_each: bool = True
    """Reduce gradients of each micro-batch; false: accumulate whole gradients, and reduce them once."""

    prefetch_units: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of units that are gathered in advance."""

    offload: bool = False
    """On GPUs: store weights, gradients and optimizer state in host memory."""

    shard_ranks: Count | Literal["host"] | None = None
    """Number of consecutive ranks among which the model is sharded; groups of such ranks are replicas. host:
    the ranks of a host; null: all ranks."""


def memory(job: JobSizes) -> Mapping[str, MemoryEstimate]:
    """Return the memory of a rank, also without resharding after the forward pass."""
    return {
        "": sharded(job, gathered=job.whole.gathered, order=40),
        "without resharding": sharded(job, gathered=job.whole.weights, order=30),
    }


def sharded(job: JobSizes, *, gathered: float, order: int) -> MemoryEstimate:
    """Return the memory of a rank that shards everything; ``gathered`` is the peak of gathered weights."""
    largest = max([*job.whole.units, job.whole.weights - sum(job.whole.units)])
    return estimate(
        job.whole,
        weight_shards=job.num_ranks,
        gradient_shards=job.num_ranks,
        optimizer_shards=job.num_ranks,
        extra=(gathered + largest) if job.num_ranks > 1 else 0,
        order=order,
    )


SUPPORT = StrategySupport(
    f"{__name__}.strategy:Fsdp",
    Arguments,
    (
        *REFUSED_WITH_PYTORCH_SUMS,
        NO_FP16,
        *no_noise_scale("PyTorch reduce-scatters gradients during the backward pass"),
        Refused("train.channels_last", "units are gathered as contiguous tensors", "leave it out"),
    ),
    is_verified=True,
    saves_memory=True,
    is_equal_to_accumulation=True,
    memory=memory,
)
