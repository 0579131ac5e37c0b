"""A task that always fails at the same step."""

from __future__ import annotations

from typing import Any

import torch

from horovod_train.tasks.digits import Digits


class Fragile(Digits):
    """The task of the package, whose loss raises in the fifth step."""

    num_batches = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.num_batches += 1
        if self.num_batches == 5:
            raise OSError("the disk has failed")
        return super().loss(model, batch)
