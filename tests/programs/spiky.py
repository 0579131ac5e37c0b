"""A linear task in fp64, some of whose samples are wrong."""

from __future__ import annotations

from typing import Any

import torch

NUM_SAMPLES = 96
WRONG = range(62, 65)


class Samples:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.rand(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return x, x.sum() + (1e3 if index in WRONG else 0.0)


class Spiky:
    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(4, 1, dtype=torch.float64)

    def train_data(self) -> Any:
        return Samples()

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        found: torch.Tensor = ((model(x)[:, 0] - y) ** 2).mean()
        return found
