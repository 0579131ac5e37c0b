"""A small network in PyTorch whose ranks can be slowed down, each in its own way."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from horovod_train.horovod.mpi import number_of

RANK = str(number_of(os.environ, "rank", alone=0))


class Slowed:
    """Trains on noise.

    Args:
        data_s: What reading a batch takes longer, by rank.
        compute_s: What the forward pass takes longer, by rank.
        pause_s: What the forward pass takes on all ranks: processors are shared, sleep is not.
        width: Of the hidden layer.
    """

    def __init__(
        self,
        data_s: dict[str, float] | None = None,
        compute_s: dict[str, float] | None = None,
        pause_s: float = 0.0,
        width: int = 16,
    ) -> None:
        self.data_s = (data_s or {}).get(RANK, 0.0)
        self.compute_s = pause_s + (compute_s or {}).get(RANK, 0.0)
        self.width = width

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, self.width), nn.ReLU(), nn.Linear(self.width, 2))

    def train_data(self) -> Any:
        return Noise(self.data_s)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        time.sleep(self.compute_s)
        return functional.cross_entropy(model(inputs), labels)


class Noise:
    """Samples that take their time when they are read together."""

    def __init__(self, pause_s: float) -> None:
        make = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(4096, 8, generator=make)
        self.labels = torch.randint(2, (4096,), generator=make)
        self.pause_s = pause_s

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Any:
        time.sleep(self.pause_s)
        return [self[index] for index in indices]
