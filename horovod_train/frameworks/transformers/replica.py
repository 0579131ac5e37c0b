"""The Transformers model of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from horovod_train.frameworks.callbacks import SavesCallbacks
from horovod_train.frameworks.torch.step.replica import TorchReplica


class TransformersReplica(SavesCallbacks, TorchReplica):
    """The model and optimizer of one rank; ``Trainer`` performs steps and evaluations."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.evaluate_now: Callable[[], dict[str, float]] = dict

    def evaluate(self, batches: Iterable[tuple[int, object]]) -> dict[str, tuple[float, int]]:
        """Return the metrics over the samples of all ranks, on rank 0; an empty mapping on other ranks."""
        metrics = self.evaluate_now()
        return {name: (value, 1) for name, value in metrics.items()} if self.data_ranks.rank == 0 else {}
