"""Where a rank stands: which ranks share the samples of a step, and which ones are all of them."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_train.collectives.base import Communicator


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job, by what they share.

    Who reads what, what a step's mean is taken over and what scales the learning rate follow from ``data``,
    never from the world. With data parallelism alone, its one axis today, both are the same ranks.

    Attributes:
        world: All ranks.
        data: Ranks that read different samples, this one among them; together they make whole steps.
    """

    world: Communicator
    data: Communicator

    @classmethod
    def data_parallel(cls, world: Communicator) -> Mesh:
        """Return the mesh of a job whose ranks all read different samples."""
        return cls(world, world)
