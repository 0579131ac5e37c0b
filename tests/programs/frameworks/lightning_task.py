"""The network as a LightningModule."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from frameworks.net import NumpyTask
from frameworks.torch_task import network, weights
from torch.nn import functional


class Module(lightning.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = network(dropout)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(self.net(x).float(), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x).float()
        self.log("loss", functional.cross_entropy(logits, y))
        self.log("accuracy", (logits.argmax(1) == y).float().mean())


class Task(NumpyTask):
    def model(self) -> Module:
        return Module(self.dropout)


__all__ = ["Task", "weights"]
