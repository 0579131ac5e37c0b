"""Transformers: a task; it is compared with the loop by hand of torch_net.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch_net import network
from vectors import Vectors


class Model(nn.Module):
    """The network as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean loss, and what it was computed from."""
        logits = self.net(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Dictionaries(Vectors):
    """The vectors as Trainer wants them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = super().__getitem__(index)
        return {"x": x, "labels": int(y)}


class Task:
    """The network for Trainer's loop."""

    def model(self) -> nn.Module:
        """Return the network."""
        return Model()

    def train_data(self) -> Dictionaries:
        """Return the vectors."""
        return Dictionaries()
