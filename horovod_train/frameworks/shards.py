"""This rank's batches of arrays that every rank stores completely, for users' own training loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from horovod_train.collectives.base import Communicator
from horovod_train.data.shard import epoch_order, num_steps, steps_of_epoch
from horovod_train.errors import UserError
from horovod_train.health.same_data import check_same_data


class Shards:
    """Batches of arrays, split over ranks; each sample is read once per epoch.

    All ranks perform the same number of steps. In the last step of an epoch, ranks may have fewer samples, or
    none: weights then correct the mean over ranks to the mean over samples.

    Args:
        world: The communicator.
        arrays: Arrays with one row per sample, equal on all ranks.
        batch_size: Samples per rank and step.
        shuffle: Use a new order in each epoch; False: the order of the arrays.
        seed: Seed of the order.

    Raises:
        UserError: Arrays have different lengths, or no rows.
    """

    def __init__(
        self, world: Communicator, *arrays: Any, batch_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        lengths = {len(array) for array in arrays}
        if len(lengths) != 1 or 0 in lengths:
            raise UserError(
                f"arrays have {sorted(lengths) or 'no'} rows", hint="give arrays of one length, at least 1"
            )
        (self.num_samples,) = lengths
        self._arrays = arrays
        self._world = world
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._is_checked = False
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None  # of the epoch that was read last

    def __len__(self) -> int:
        """Return the number of steps in an epoch, equal on all ranks."""
        return num_steps(self.num_samples, 0, self._batch_size * self._world.size)

    def epoch(self, number: int) -> Iterator[tuple[float, tuple[Any, ...]]]:
        """Yield this rank's (weight, batch) for each step of epoch ``number``; the first epoch is 0.

        Multiply the mean loss of the batch by the weight: the mean over ranks is then the mean over all
        samples of the step. The weight is 1 in full steps. A rank without samples receives one sample with
        weight 0.
        """
        for index in range(len(self)):
            yield self.batch(number, index)

    def batch(self, number: int, index: int) -> tuple[float, tuple[Any, ...]]:
        """Return weight and batch of one step of an epoch, as ``epoch`` yields them.

        All ranks must make the first call, in which they compare their arrays.

        Raises:
            UserError: Arrays differ between ranks.
        """
        if self._order is None or self._order[0] != number:
            self._order = number, epoch_order(self.num_samples, self._seed, number, shuffle=self._shuffle)
        if not self._is_checked:
            self._is_checked = True
            check_same_data(
                self._world,
                "the arrays",
                self.num_samples,
                lambda numbers: [np.asarray(array)[numbers] for array in self._arrays],
            )
        order = self._order[1]
        step = next(
            steps_of_epoch(
                num_samples=self.num_samples,
                cursor=index * self._batch_size * self._world.size,
                batch_size_per_rank=self._batch_size,
                accumulation_steps=1,
                rank=self._world.rank,
                size=self._world.size,
            )
        )
        weight, rows = 0.0, order[:1]
        if step.micro_batches:
            (mine,) = step.micro_batches
            weight, rows = mine.share * self._world.size, order[mine.start : mine.stop]
        return weight, tuple(np.asarray(array)[rows] for array in self._arrays)
