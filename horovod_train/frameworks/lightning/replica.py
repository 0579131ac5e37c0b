"""A Lightning module as the rest of the product sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning

from horovod_train.frameworks.callbacks import SavesCallbacks
from horovod_train.frameworks.torch.step.replica import TorchReplica


class LightningReplica(SavesCallbacks, TorchReplica):
    """A module as the rest of the product sees it; steps and evaluations are made by ``Trainer``."""

    def __init__(self, module: lightning.LightningModule, **arguments: Any) -> None:
        super().__init__(model=module, **arguments)
        self.metrics: dict[str, float] | None = None
        self.evaluate_now: Callable[[], dict[str, float]] = dict

    def evaluate(self, batches: Iterable[tuple[int, object]]) -> dict[str, tuple[float, int]]:
        """Return what ``validation_step`` has logged, over all ranks, on rank 0; others return nothing.

        At the end of an epoch ``Trainer`` has evaluated already; without that, it does so now.
        """
        metrics = self.evaluate_now() if self.metrics is None else self.metrics
        self.metrics = None
        return {name: (value, 1) for name, value in metrics.items()} if self.data_ranks.rank == 0 else {}
