"""Classification of scikit-learn's bundled breast cancer data with a small perceptron, for studies.

usage: horovod-train study benchmarks/tumours.yaml --seeds 5 --policies linear,sqrt,adascale
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

Batch = tuple[torch.Tensor, torch.Tensor]


class Tumours:
    """569 samples of 30 numbers, two classes; every fourth sample is an evaluation sample."""

    def __init__(self) -> None:
        values, labels = load_breast_cancer(return_X_y=True)
        self._labels = torch.tensor(labels)
        self._is_eval = torch.arange(len(labels)) % 4 == 0
        values = torch.tensor(values, dtype=torch.float32)
        known = values[~self._is_eval]
        self._values = (values - known.mean(0)) / known.std(0)

    def model(self) -> nn.Module:
        """Return a network that maps [batch, 30] to [batch, 2]."""
        return nn.Sequential(nn.Linear(30, 32), nn.Tanh(), nn.Linear(32, 2))

    def train_data(self) -> TensorDataset:
        """Return the 426 training samples."""
        return TensorDataset(self._values[~self._is_eval], self._labels[~self._is_eval])

    def eval_data(self) -> TensorDataset:
        """Return the 143 evaluation samples."""
        return TensorDataset(self._values[self._is_eval], self._labels[self._is_eval])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross entropy of a batch."""
        return functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Return loss and correctness of each sample."""
        scores = model(batch[0])
        return {
            "loss": functional.cross_entropy(scores, batch[1], reduction="none"),
            "accuracy": (scores.argmax(1) == batch[1]).float(),
        }
