"""What this package adds, and what a job may ask of it. Nothing here imports a framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from horovod_train.config.fields import Count, ProgramOption, Section
from horovod_train.config.support import (
    Axes,
    Batch,
    BatchSystem,
    CodecSupport,
    FrameworkSupport,
    JobSizes,
    MemoryEstimate,
    Refused,
    StrategySupport,
    TrackerSupport,
    estimate,
)


class CopiesArguments(Section):
    """Arguments of ranks that compute the same."""

    copies: Count = 1
    """Number of consecutive ranks that train on the same samples."""


def copies_axes(world_size: int, arguments: CopiesArguments) -> Axes:
    """Return the axes: copies are along the tensor axis, and read the same samples."""
    return Axes.of(world_size, tensor=arguments.copies)


def copies_memory(sizes: JobSizes) -> Mapping[str, MemoryEstimate]:
    """Return the memory of a rank: that of one process."""
    return {"": estimate(sizes.whole, keeps_gradients=True, order=90)}


COPIES_SUPPORT = StrategySupport(
    "outside.copies:copies",
    CopiesArguments,
    (Refused("train.compile", "copies are not compiled", "leave it out"),),
    axes=copies_axes,
    memory=copies_memory,
    is_verified=True,
)


class RoundedArguments(Section):
    """Arguments of a codec that rounds gradients."""

    to: Literal["fp16", "bf16"] = "bf16"
    """Data type on the wire."""


ROUNDED_SUPPORT = CodecSupport("outside.copies:rounded", RoundedArguments)


class LinesArguments(Section):
    """Arguments of a file with a line for each value."""

    path: str = "lines.txt"
    """File, relative to the folder of the job's runs."""

    digits: Annotated[int, Field(ge=1, le=17)] = 6
    """Significant digits."""


LINES_SUPPORT = TrackerSupport("outside.lines:Lines", LinesArguments, default_place="lines.txt")


class Queue(Batch):
    """Job of a batch system."""

    options: list[ProgramOption] = []
    """Further options of oq-submit."""

    ranks_per_node: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Ranks on each node."""


QUEUE = BatchSystem("queue", "Outside Queue", Queue, r"--array", lambda settings: settings.options)
QUEUE_SUPPORT = QUEUE.support("outside.queue:QueueLauncher")

NUMPY_SUPPORT = FrameworkSupport(
    "numpy_framework:NumpyFramework",
    ("numpy",),
    "1.0",
    "ours",
    (Refused("train.compile", "NumPy is not compiled", "leave it out"),),
    modules=frozenset({"numpy"}),
)
