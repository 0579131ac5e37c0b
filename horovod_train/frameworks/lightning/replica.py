"""The Lightning module of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning

from horovod_train.frameworks.callbacks import SavesCallbacks
from horovod_train.frameworks.torch.step.replica import TorchReplica


class LightningReplica(SavesCallbacks, TorchReplica):
    """The module and optimizer of one rank; ``Trainer`` performs steps and evaluations."""

    def __init__(self, module: lightning.LightningModule, **arguments: Any) -> None:
        super().__init__(model=module, **arguments)
        self.metrics: dict[str, float] | None = None
        self.evaluate_now: Callable[[], dict[str, float]] = dict

    def evaluate(self, batches: Iterable[tuple[int, object]]) -> dict[str, tuple[float, int]]:
        """Return the metrics of ``validation_step`` over all ranks, on rank 0; else an empty mapping.

        ``Trainer`` evaluates, unless it has already done so at the end of an epoch.
        """
        metrics = self.evaluate_now() if self.metrics is None else self.metrics
        self.metrics = None
        return {name: (value, 1) for name, value in metrics.items()} if self.data_ranks.rank == 0 else {}
