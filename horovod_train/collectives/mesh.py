"""Where a rank stands: which ranks share the samples of a step, and which ones are all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from horovod_train.collectives.base import Communicator
from horovod_train.config.axes import Axes
from horovod_train.errors import UserError


@runtime_checkable
class Splits(Protocol):
    """Ranks that can be split into groups."""

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return the ranks of the group that this rank is in."""
        ...


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job, by what they share.

    Who reads what, what a step's mean is taken over and what scales the learning rate follow from ``data``,
    never from the world. With data parallelism alone both are the same ranks.

    Attributes:
        world: All ranks.
        data: Ranks that read different samples and have the same part of the model, this one among them;
            together they make whole steps.
        axes: How all ranks are arranged.
    """

    world: Communicator
    data: Communicator
    axes: Axes = field(default_factory=lambda: Axes(1))

    @classmethod
    def of(cls, world: Communicator, axes: Axes) -> Mesh:
        """Return the mesh of ranks that are arranged along axes; every rank calls it.

        Raises:
            UserError: The ranks cannot be split.
        """
        if axes.data == world.size:
            return cls(world, world, axes)
        if not isinstance(world, Splits):
            raise UserError("these ranks cannot share a model", hint="use framework: torch")
        return cls(world, world.split(axes.data_groups()), axes)

    @classmethod
    def data_parallel(cls, world: Communicator) -> Mesh:
        """Return the mesh of a job whose ranks all read different samples."""
        return cls(world, world, Axes(world.size))
