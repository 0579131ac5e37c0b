"""A task that draws random numbers in its model, its loss and its data."""

from __future__ import annotations

import copy
import os
import signal
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Noisy:
    """A model with dropout in layers and attention, noise, and data with random crops."""

    def __init__(self, kind="transformer", data="plain", killed=None):
        self.kind, self.data, self.killed, self.num_calls = kind, data, killed, 0

    def model(self):
        return copy.deepcopy(model_of(self.kind))

    def train_data(self):
        return {"plain": Images, "crops": Crops, "many": ManyCrops}[self.data]()

    def loss(self, model, batch):
        images, labels = batch
        self.num_calls += 1
        if self.killed is not None and self.num_calls == 25 and not Path(self.killed).exists():
            Path(self.killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return functional.cross_entropy(model(images + 0.1 * torch.randn_like(images)), labels)


@cache
def model_of(kind):
    """The model, made before ranks are, which are threads and share the generators."""
    torch.manual_seed(0)
    if kind == "convolution":
        return nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Dropout2d(0.1), nn.Flatten(), nn.Linear(96, 16),
            nn.Dropout(0.1), nn.Linear(16, 3),
        )  # fmt: skip
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Dropout(0.1), nn.Linear(36, 3))


class Images:
    """50 images of 6 x 6 pixels."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(50, 1, 8, 8, generator=generator)
        self.labels = torch.randint(3, (50,), generator=generator)

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return self.images[index, :, 1:7, 1:7], self.labels[index]


class Crops(Images):
    """Random parts of the images, with random brightness."""

    def __getitem__(self, index):
        top, left = np.random.randint(0, 3, 2)
        image = self.images[index, :, top : top + 6, left : left + 6] * (1 + 0.1 * torch.rand(()))
        return image, self.labels[index]


class ManyCrops(Crops):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Evaluated(Noisy):
    """A task whose metrics draw random numbers, as the bound of a variational autoencoder does."""

    draws_otherwise = False

    def eval_data(self):
        return Images()

    def metrics(self, model, batch):
        images, labels = batch
        noisy = images + torch.randn_like(images)
        found = {"loss": functional.cross_entropy(model(noisy), labels), "drawn": noisy.mean()}
        if self.draws_otherwise:
            found |= {"latent": torch.randn(16, 3).mean(), "order": torch.randperm(5)[0].double()}
        return found


class EvaluatedOtherwise(Evaluated):
    """Also numbers that belong to no sample."""

    draws_otherwise = True
