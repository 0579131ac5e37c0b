"""Arrays as ``model.fit`` can read them on several ranks."""

from __future__ import annotations

from typing import Any

import keras

from horovod_train.collectives.base import Communicator
from horovod_train.frameworks.keras.feed import weighted
from horovod_train.frameworks.shards import Shards


class ShardedDataset(keras.utils.PyDataset):
    """This rank's batches of arrays: every sample once per epoch, the same number of steps everywhere.

    ``model.fit(x, y)`` would train every rank on all samples, and slices of different lengths would
    make ranks wait for each other for ever.

    Args:
        world: The ranks.
        x: Inputs, one row per sample; the same on all ranks.
        y: Labels.
        batch_size: Samples per rank and step.
        shuffle: Use another order in each epoch.
        seed: Of the order.
    """

    def __init__(
        self, world: Communicator, x: Any, y: Any, *, batch_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        self._shards = Shards(world, x, y, batch_size=batch_size, shuffle=shuffle, seed=seed)
        self._epoch = 0
        self._batches: list[Any] = []

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return len(self._shards)

    def __getitem__(self, index: int) -> Any:
        """Return (inputs, labels, weights) of a step."""
        if not self._batches:
            self._batches = list(self._shards.epoch(self._epoch))
        weight, batch = self._batches[index]
        return weighted(batch, weight)

    def on_epoch_end(self) -> None:
        """Take another order for the next epoch."""
        self._epoch += 1
        self._batches = []
