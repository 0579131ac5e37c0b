"""What a user brings for PyTorch.

class MyTask:
    def model(self): ...                   a torch.nn.Module
    def train_data(self): ...              a dataset with __len__ and __getitem__
    def loss(self, model, batch): ...      mean loss over the samples of a batch

    def eval_data(self): ...               optional: data for evaluation
    def metrics(self, model, batch): ...   optional: {name: one value per sample}
    def param_groups(self, model): ...     optional: optimizer groups, each may have an lr_scale
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

REQUIRED = ("model", "train_data", "loss")


class TorchTask(Protocol):
    """The required methods of a task."""

    def model(self) -> torch.nn.Module:
        """Return a new model, on the CPU."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss over a batch, shape []."""
        ...
