"""Classification of scikit-learn's bundled handwritten digits with a small convolutional network.

``digit_images`` reads the digits without importing scikit-learn, because the import takes long.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset


def digit_images() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return 1,797 images of 8 x 8 pixels with values 0 .. 16, and their classes, 0 .. 9.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    # The format of sklearn.datasets.load_digits: one image per line, with its class at the end.
    lines = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return lines[:, :-1].reshape(-1, 8, 8), lines[:, -1].astype(np.int64)


class Digits:
    """1,797 images of 8 x 8 pixels, ten classes; every fifth image is an evaluation sample.

    Args:
        width: Channels of the first layer.
    """

    def __init__(self, width: int = 32) -> None:
        self.width = width
        images, labels = digit_images()
        self._images = torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 16
        self._labels = torch.tensor(labels)
        self._is_eval = torch.arange(len(self._labels)) % 5 == 0

    def model(self) -> nn.Module:
        """Return a network that maps [batch, 1, 8, 8] to [batch, 10]."""
        width = self.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def train_data(self) -> Dataset[tuple[torch.Tensor, ...]]:
        """Return the 1,437 training samples."""
        return TensorDataset(self._images[~self._is_eval], self._labels[~self._is_eval])

    def eval_data(self) -> Dataset[tuple[torch.Tensor, ...]]:
        """Return the 360 evaluation samples."""
        return TensorDataset(self._images[self._is_eval], self._labels[self._is_eval])

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross entropy of a batch."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return loss and correctness of each sample."""
        images, labels = batch
        scores = model(images)
        return {
            "loss": functional.cross_entropy(scores, labels, reduction="none"),
            "accuracy": scores.argmax(dim=1) == labels,
        }
