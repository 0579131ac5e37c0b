"""Lightning: a task; it is compared with the loop by hand of torch_net.py."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch.nn import functional
from torch_net import network
from vectors import Vectors


class Module(lightning.LightningModule):
    """The network as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the mean loss."""
        x, y = batch
        return functional.cross_entropy(self.net(x), y)


class Task:
    """The network for Lightning's loop."""

    def model(self) -> Module:
        """Return the network."""
        return Module()

    def train_data(self) -> Vectors:
        """Return the vectors."""
        return Vectors()
