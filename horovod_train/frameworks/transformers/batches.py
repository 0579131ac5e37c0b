"""Micro-batches of an epoch for ``Trainer``, as lists of indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from horovod_train.collectives.base import Communicator
from horovod_train.data.shard import MicroBatch, StepShare, epoch_order, num_steps, steps_of_epoch


@dataclass
class ShardedBatches:
    """This rank's micro-batches of an epoch, as lists of indices; a missing one has a sample of weight 0."""

    num_samples: int
    world: Communicator
    batch_size: int
    accumulation_steps: int
    seed: int
    epoch: int = 0

    @property
    def _step_size(self) -> int:
        return self.batch_size * self.accumulation_steps * self.world.size

    def _steps(self, cursor: int = 0) -> Iterator[StepShare]:
        return steps_of_epoch(
            num_samples=self.num_samples,
            cursor=cursor,
            batch_size_per_rank=self.batch_size,
            accumulation_steps=self.accumulation_steps,
            rank=self.world.rank,
            size=self.world.size,
        )

    def __len__(self) -> int:
        return num_steps(self.num_samples, 0, self._step_size) * self.accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.num_samples, self.seed, self.epoch, shuffle=True)
        for step in self._steps():
            for place in range(self.accumulation_steps):
                if place < len(step.micro_batches):
                    piece = step.micro_batches[place]
                    yield order[piece.start : piece.stop].tolist()
                else:
                    yield [int(order[0])]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of samples."""
        self.epoch = epoch

    def lengths(self, step: int) -> list[int]:
        """Return the number of counted samples in each micro-batch of a step, counted over epochs."""
        number = step % num_steps(self.num_samples, 0, self._step_size)
        found = next(self._steps(number * self._step_size))
        return lengths_of(found.micro_batches, self.accumulation_steps)


def lengths_of(micro_batches: Sequence[MicroBatch], num_places: int) -> list[int]:
    """Return the number of counted samples in each of ``num_places`` micro-batches; missing ones have 0."""
    counted = [len(each) if each.share else 0 for each in micro_batches]
    return [*counted, *[0] * (num_places - len(counted))]
