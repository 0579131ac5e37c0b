"""The network in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from frameworks.net import NumpyTask, start_weights
from torch import nn
from torch.nn import functional


def network(dropout: float = 0.0) -> nn.Module:
    start = {name: torch.from_numpy(array) for name, array in start_weights().items()}
    net = nn.Sequential(nn.Linear(6, 16), nn.Sequential(nn.Tanh(), nn.Dropout(dropout)), nn.Linear(16, 3))
    net.load_state_dict(
        {
            "0.weight": start["w1"].T,
            "0.bias": start["b1"],
            "2.weight": start["w2"].T,
            "2.bias": start["b2"],
        }
    )
    return net


class Task(NumpyTask):
    def model(self) -> nn.Module:
        return network(self.dropout)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(model(x).float(), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        logits = model(x).float()
        return {
            "loss": functional.cross_entropy(logits, y, reduction="none"),
            "accuracy": logits.argmax(1) == y,
        }


def weights(replica: Any) -> list[Any]:
    w1, b1, w2, b2 = (p.detach().numpy() for p in replica.model.parameters())
    return [w1.T, b1, w2.T, b2]
