"""Replicas whose steps and evaluations the framework's own ``Trainer`` performs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from horovod_train.data.shard import MicroBatch
from horovod_train.frameworks.callbacks import SavesCallbacks
from horovod_train.frameworks.torch.step.replica import TorchReplica


class TrainerReplica(SavesCallbacks, TorchReplica):
    """The model and optimizer of one rank in a ``Trainer`` of Lightning or Transformers.

    Attributes:
        metrics: Result of an evaluation that ``Trainer`` has already performed at the end of an epoch.
        evaluate_now: Evaluates with ``Trainer``; returns the metrics over the samples of all ranks.
    """

    metrics: dict[str, float] | None = None
    evaluate_now: Callable[[], dict[str, float]]

    def evaluate(self, batches: Iterable[tuple[MicroBatch, object]]) -> dict[str, tuple[float, int]]:
        """Return the metrics over the samples of all ranks, on rank 0; an empty mapping on other ranks."""
        metrics = self.evaluate_now() if self.metrics is None else self.metrics
        self.metrics = None
        return {name: (value, 1) for name, value in metrics.items()} if self.data_ranks.rank == 0 else {}
