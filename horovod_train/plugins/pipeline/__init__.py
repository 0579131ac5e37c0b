"""Strategy ``pipeline``: layers are distributed over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from horovod_train.config.fields import Count, Section
from horovod_train.config.support import Axes, JobSizes, MemoryEstimate, Refused, StrategySupport, estimate
from horovod_train.frameworks.torch.strategies import (
    NO_CODECS,
    NO_FP16,
    NO_GRAPHS,
    NO_RANDOMNESS_BY_SAMPLE,
    no_noise_scale,
)

TRACER_BYTES = 75 * 2**20
"""Additional memory of a process that has traced a model (``torch.fx`` imports SymPy)."""


class StageArguments(Section):
    """Arguments of pipeline stages."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """gpipe: all forward passes first; 1f1b: each backward pass as early as possible, which stores fewer
    activations; interleaved: 1f1b with several stages per rank, which reduces idle time."""

    virtual_stages_per_rank: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of stages per rank; with interleaved at least 2."""

    balance: Literal["parameters", "time"] = "parameters"
    """Balance stages by number of parameters, or by the time measured for a sample batch."""

    @model_validator(mode="after")
    def _chunks_are_interleaved(self) -> Self:
        if (self.virtual_stages_per_rank > 1) != (self.schedule == "interleaved"):
            raise ValueError(
                f"schedule: {self.schedule} and virtual_stages_per_rank: {self.virtual_stages_per_rank} do "
                "not go together; several stages per rank are interleaved, and interleaved needs at least 2"
            )
        return self


class Arguments(StageArguments):
    """Arguments of pipeline parallelism: layers are distributed over ranks."""

    pipeline_parallel_degree: Count | None = None
    """Number of ranks of a pipeline; null: all ranks."""


def axes(world_size: int, arguments: Arguments) -> Axes:
    """Return the axes of ``world_size`` ranks."""
    return Axes.of(world_size, pipeline=arguments.pipeline_parallel_degree)


def memory(job: JobSizes) -> Mapping[str, MemoryEstimate]:
    """Return the memory for the first of approximately equal stages, because it stores most activations.

    The process traces a second, whole model before the first one is cut into stages.
    """
    sizes, num_ranks = job.whole, job.num_ranks
    stage = max([sizes.weights / num_ranks, sizes.weights - sum(sizes.units), *sizes.units])
    part = sizes.weights / stage
    under_way = min(num_ranks, job.job.train.accumulation_steps)
    need = estimate(
        sizes,
        weight_shards=part,
        gradient_shards=part,
        optimizer_shards=part,
        activation_shards=num_ranks / under_way,
        order=70,
    )
    return {"": replace(need, process=max(need.peak, 2 * sizes.weights) + sizes.process + TRACER_BYTES)}


STAGES_CANNOT = (
    NO_FP16,
    *no_noise_scale("a rank has a part of the gradient only"),
    NO_RANDOMNESS_BY_SAMPLE,
    Refused("train.channels_last", "stages exchange contiguous tensors", "leave it out"),
    Refused("train.compile", "the strategy calls the stages, not the compiled model", "leave it out"),
    NO_GRAPHS,
    NO_CODECS,
)

SUPPORT = StrategySupport(
    f"{__name__}.strategy:Pipeline",
    Arguments,
    STAGES_CANNOT,
    axes=axes,
    is_verified=True,
    saves_memory=True,
    memory=memory,
)
