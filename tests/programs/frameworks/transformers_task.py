"""The network as Transformers' Trainer wants it: it takes its labels and returns its loss."""

from __future__ import annotations

from typing import Any

import torch
from frameworks.net import NumpyTask
from frameworks.torch_task import network, weights
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = network(dropout)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x).float()
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Dictionaries:
    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self.samples[index]
        return {"x": x, "labels": int(y)}


class Task(NumpyTask):
    def model(self) -> nn.Module:
        return Model(self.dropout)

    def train_data(self) -> Any:
        return Dictionaries(super().train_data())

    def eval_data(self) -> Any:
        return Dictionaries(super().eval_data())

    def metrics(self, found: Any) -> dict[str, float]:
        return {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()}


__all__ = ["Task", "weights"]
