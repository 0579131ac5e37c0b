"""A model of Transformers as the rest of the product sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from horovod_train.frameworks.callbacks import SavesCallbacks
from horovod_train.frameworks.torch.step.replica import TorchReplica


class TransformersReplica(SavesCallbacks, TorchReplica):
    """A model as the rest of the product sees it; steps and evaluations are made by ``Trainer``."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.evaluate_now: Callable[[], dict[str, float]] = dict

    def evaluate(self, batches: Iterable[tuple[int, object]]) -> dict[str, tuple[float, int]]:
        """Return the metrics over all ranks' samples, on rank 0; others return nothing."""
        metrics = self.evaluate_now()
        return {name: (value, 1) for name, value in metrics.items()} if self.data_ranks.rank == 0 else {}
