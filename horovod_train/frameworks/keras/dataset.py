"""Arrays, split over ranks, for ``model.fit``."""

from __future__ import annotations

from typing import Any

import keras

from horovod_train.collectives.base import Communicator
from horovod_train.frameworks.keras.feed import weighted
from horovod_train.frameworks.shards import Shards


class ShardedDataset(keras.utils.PyDataset):
    """This rank's batches of arrays: each sample once per epoch, the same number of steps on all ranks.

    With ``model.fit(x, y)``, each rank trains on all samples. With slices of different lengths, ranks hang,
    because they perform different numbers of steps.

    Args:
        world: The communicator.
        x: Inputs, one row per sample; equal on all ranks.
        y: Labels.
        batch_size: Samples per rank and step.
        shuffle: Use a new order in each epoch.
        seed: Seed of the order.
    """

    def __init__(
        self, world: Communicator, x: Any, y: Any, *, batch_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        self._shards = Shards(world, x, y, batch_size=batch_size, shuffle=shuffle, seed=seed)
        self._epoch = 0

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return len(self._shards)

    def __getitem__(self, index: int) -> Any:
        """Return (inputs, labels, weights) of a step."""
        weight, batch = self._shards.batch(self._epoch, index)
        return weighted(batch, weight)

    def on_epoch_end(self) -> None:
        """Change to the order of the next epoch."""
        self._epoch += 1
