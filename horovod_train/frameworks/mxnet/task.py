"""Interface of a task for MXNet.

class MyTask:
    def model(self): ...                a gluon Block, initialized
    def train_data(self): ...           samples: __len__ and __getitem__, NumPy arrays
    def loss(self, model, batch): ...   mean loss over the samples of a batch

    def eval_data(self): ...            optional: data for evaluation
    def metrics(self, model, batch): .. optional: {name: one value per sample}
"""

from __future__ import annotations

from typing import Any, Protocol

REQUIRED = ("model", "train_data", "loss")
OPTIONAL = ("eval_data", "metrics")


class MxnetTask(Protocol):
    """The required methods of a task."""

    def model(self) -> Any:
        """Return a new block."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def loss(self, model: Any, batch: Any) -> Any:
        """Return the mean loss over a batch."""
        ...
