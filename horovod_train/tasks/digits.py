"""Classification of scikit-learn's bundled handwritten digits with a small convolutional network."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from horovod_train.tasks.digit_images import digit_images


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
