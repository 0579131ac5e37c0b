"""Models whose steps are limited by different things, as tasks that note when steps begin."""

from __future__ import annotations

import atexit
import json
import os
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from horovod_train.horovod.mpi import number_of

NUM_SAMPLES = 4096


class Timed:
    """Notes the time of each call of ``loss``: one per step. Rank 0 writes them down at the end."""

    batch_size = 32

    def __init__(self) -> None:
        self._starts: list[float] = []
        atexit.register(self._write)

    def _write(self) -> None:
        target = os.environ.get("BENCH_OUT")
        rank = number_of(os.environ, "rank", alone=int(os.environ.get("RANK", "0")))
        if target and rank == 0:
            Path(target).write_text(json.dumps(self._starts))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss; note the time."""
        if model.training:
            self._starts.append(perf_counter())
        inputs, labels = batch
        return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


class Mlp(Timed):
    """33.6 million parameters in large matrices: communication decides."""

    batch_size = 32

    def model(self) -> nn.Module:
        """Map [batch, 2048] to [batch, 10]."""
        width = 2048
        hidden = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(width, 10))

    def train_data(self) -> TensorDataset:
        """Return random vectors."""
        make = torch.Generator().manual_seed(1)
        return TensorDataset(
            torch.randn(NUM_SAMPLES, 2048, generator=make), torch.randint(10, (NUM_SAMPLES,), generator=make)
        )


class Convolutions(Timed):
    """0.6 million parameters in convolutions: computation decides."""

    batch_size = 32

    def model(self) -> nn.Module:
        """Map [batch, 3, 32, 32] to [batch, 10]."""
        layers: list[nn.Module] = []
        channels = [3, 32, 64, 64, 128, 128, 256]
        for number, (before, after) in enumerate(pairwise(channels)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if number % 2 else []
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))

    def train_data(self) -> TensorDataset:
        """Return random images."""
        make = torch.Generator().manual_seed(1)
        images = torch.randn(1024, 3, 32, 32, generator=make)
        return TensorDataset(images, torch.randint(10, (1024,), generator=make))


class Normalized(Convolutions):
    """The same with batch normalization and a small batch: many small parameters and kernels."""

    batch_size = 16

    def model(self) -> nn.Module:
        """Map [batch, 3, 32, 32] to [batch, 10]."""
        layers: list[nn.Module] = []
        for layer in super().model():
            layers.append(layer)
            if isinstance(layer, nn.Conv2d):
                layers.append(nn.BatchNorm2d(layer.out_channels))
        return nn.Sequential(*layers)


class Transformer(Timed):
    """4.9 million parameters in a small transformer: both decide."""

    batch_size = 8
    vocabulary, width, length = 2000, 256, 64

    def model(self) -> nn.Module:
        """Map [batch, length] tokens to [batch, length, vocabulary]."""
        layer = nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, dropout=0.0, batch_first=True)
        return nn.Sequential(
            nn.Embedding(self.vocabulary, self.width),
            nn.TransformerEncoder(layer, 5, enable_nested_tensor=False),
            nn.Linear(self.width, self.vocabulary),
        )

    def train_data(self) -> TensorDataset:
        """Return random token sequences."""
        make = torch.Generator().manual_seed(1)
        tokens = torch.randint(self.vocabulary, (2048, self.length + 1), generator=make)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])


MODELS: dict[str, type[Timed]] = {
    "mlp": Mlp,
    "convolutions": Convolutions,
    "normalized": Normalized,
    "transformer": Transformer,
}
