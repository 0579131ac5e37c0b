"""Interface of a task for TensorFlow.

class MyTask:
    def model(self): ...                         a keras.Model or tf.Module
    def train_data(self): ...                    samples: __len__ and __getitem__, NumPy arrays
    def loss(self, model, batch, training): ...  mean loss over the samples of a batch

    def eval_data(self): ...                     optional: data for evaluation
    def metrics(self, model, batch): ...         optional: {name: one value per sample}

``loss`` and ``metrics`` are compiled with ``tf.function``.
"""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

REQUIRED = ("model", "train_data", "loss")
OPTIONAL = ("eval_data", "metrics")


class TensorflowTask(Protocol):
    """The required methods of a task."""

    def model(self) -> Any:
        """Return a new model."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def loss(self, model: Any, batch: Any, training: bool) -> tf.Tensor:
        """Return the mean loss over a batch, shape []."""
        ...
