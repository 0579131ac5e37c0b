"""The communicators of a rank: all ranks of the job, and its data-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from horovod_train.collectives.base import Communicator
from horovod_train.config.axes import Axes
from horovod_train.errors import UserError


@runtime_checkable
class Splits(Protocol):
    """A communicator that can be split into groups."""

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return the communicator of the group that contains this rank."""
        ...


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job and the data-parallel group of this rank.

    The samples of a rank, the mean over a step and the scale of the learning rate depend on ``data``, never
    on ``world``. With data parallelism alone, both are the same communicator.

    Attributes:
        world: All ranks.
        data: This rank's data-parallel group. Its ranks store the same part of the model and read different
            samples; together they read all samples of a step.
        axes: Arrangement of all ranks.
    """

    world: Communicator
    data: Communicator
    axes: Axes = field(default_factory=lambda: Axes(1))

    @classmethod
    def of(cls, world: Communicator, axes: Axes) -> Mesh:
        """Return the mesh of ranks that are arranged along axes; every rank must call it.

        Raises:
            UserError: The communicator cannot be split.
        """
        if axes.data == world.size:
            return cls(world, world, axes)
        if not isinstance(world, Splits):
            raise UserError("this framework does not support model parallelism", hint="use framework: torch")
        return cls(world, world.split(axes.data_groups()), axes)

    @classmethod
    def data_parallel(cls, world: Communicator) -> Mesh:
        """Return the mesh of a job with data parallelism alone."""
        return cls(world, world, Axes(world.size))
