"""A quadratic with known gradient noise, whose evaluation has no noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Quadratic:
    """Loss |w - x|^2 / 2 with x normally distributed around 0: the gradient of a sample is w - x."""

    def __init__(self, dimension: int = 50, noise: float = 1.0, distance: float = 1.0) -> None:
        self.dimension, self.noise, self.distance = dimension, noise, distance

    def model(self) -> nn.Module:
        model = nn.Linear(self.dimension, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(self.distance / self.dimension**0.5)
        return model

    def train_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        samples = torch.randn(4096, self.dimension, generator=generator) * self.noise
        return TensorDataset(samples - samples.mean(0))

    def eval_data(self) -> TensorDataset:
        return TensorDataset(torch.zeros(2, self.dimension))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        return ((model.weight - batch[0]) ** 2).sum(dim=1).mean() / 2

    def metrics(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        square = (model.weight**2).sum().expand(len(batch[0]))
        return {"loss": square / 2, "distance": square}
