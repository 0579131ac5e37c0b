"""Strategy ``tensor_parallel``: layers are sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping

from horovod_train.config.fields import Count
from horovod_train.config.support import Axes, JobSizes, MemoryEstimate, Refused, StrategySupport, estimate
from horovod_train.frameworks.torch.strategies import (
    NO_CODECS,
    NO_FP16,
    NO_GRAPHS,
    NO_RANDOMNESS_BY_SAMPLE,
    TensorPlan,
    no_noise_scale,
)


class Arguments(TensorPlan):
    """Arguments of tensor parallelism, which shards layers over ranks with PyTorch's DTensor."""

    tensor_parallel_degree: Count | None = None
    """Number of ranks among which each layer is sharded; null: all ranks."""


def axes(world_size: int, arguments: Arguments) -> Axes:
    """Return the axes of ``world_size`` ranks."""
    return Axes.of(world_size, tensor=arguments.tensor_parallel_degree)


def memory(job: JobSizes) -> Mapping[str, MemoryEstimate]:
    """Return the memory of a rank; nothing if the layers cannot be cut."""
    return {} if job.of_tensor_rank is None else {"": estimate(job.of_tensor_rank, order=60)}


SUPPORT = StrategySupport(
    f"{__name__}.strategy:TensorParallel",
    Arguments,
    (
        NO_FP16,
        Refused("train.channels_last", "weights are sharded as contiguous tensors", "leave it out"),
        NO_GRAPHS,
        *no_noise_scale("a rank has a part of the gradient only"),
        NO_RANDOMNESS_BY_SAMPLE,
        NO_CODECS,
    ),
    axes=axes,
    is_verified=True,
    saves_memory=True,
    memory=memory,
)
