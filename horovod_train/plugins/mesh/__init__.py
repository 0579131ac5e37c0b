"""Strategy ``mesh``: ranks along a data, a pipeline and a tensor axis."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from horovod_train.config.fields import Count
from horovod_train.config.support import Axes, Refused, StrategySupport
from horovod_train.frameworks.torch.strategies import TensorPlan
from horovod_train.frameworks.torch.strategies.fsdp import Arguments as FsdpArguments
from horovod_train.plugins.pipeline import STAGES_CANNOT, StageArguments


class Arguments(TensorPlan, StageArguments, FsdpArguments):
    """Arguments of a mesh of ranks with a data, a pipeline and a tensor axis."""

    pipeline_parallel_degree: Count = 1
    """Number of ranks of a pipeline."""

    tensor_parallel_degree: Count = 1
    """Number of ranks among which each layer is sharded."""

    shard_data_parallel: bool = False
    """Shard weights over data-parallel ranks, as under fsdp and with its arguments."""

    @model_validator(mode="after")
    def _has_one_way(self) -> Self:
        if self.shard_data_parallel and self.pipeline_parallel_degree > 1:
            raise ValueError(
                "shard_data_parallel: true needs pipeline_parallel_degree: 1, for stages keep whole layers; "
                "leave one of them out"
            )
        given = self.model_fields_set
        unused = (given & set(FsdpArguments.model_fields) if not self.shard_data_parallel else set()) | (
            given & set(StageArguments.model_fields) if self.pipeline_parallel_degree == 1 else set()
        )
        if unused:
            raise ValueError(
                f"{', '.join(sorted(unused))} would have no effect: arguments of fsdp need "
                "shard_data_parallel: true, and those of stages need pipeline_parallel_degree: 2 or more"
            )
        return self


def axes(world_size: int, arguments: Arguments) -> Axes:
    """Return the axes of ``world_size`` ranks."""
    return Axes.of(
        world_size, pipeline=arguments.pipeline_parallel_degree, tensor=arguments.tensor_parallel_degree
    )


SUPPORT = StrategySupport(
    f"{__name__}.strategy:mesh",
    Arguments,
    (
        *STAGES_CANNOT,
        Refused("allreduce.wire_dtype", "sums between data-parallel ranks are uncompressed", "use fp32"),
    ),
    axes=axes,
    is_verified=True,
    saves_memory=True,
)
