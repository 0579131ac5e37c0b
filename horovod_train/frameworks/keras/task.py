"""Interface of a task for Keras.

class MyTask:
    def model(self): ...        a keras.Model, not compiled
    def train_data(self): ...   samples (x, y): __len__ and __getitem__, NumPy arrays
    def compile(self): ...      arguments of model.compile except the optimizer: {"loss": ...}

    def eval_data(self): ...    optional: data for evaluation
    def callbacks(self): ...    optional: a list of Keras callbacks
"""

from __future__ import annotations

from typing import Any, Protocol

import keras

REQUIRED = ("model", "train_data", "compile")
OPTIONAL = ("eval_data", "callbacks")


class KerasTask(Protocol):
    """The required methods of a task."""

    def model(self) -> keras.Model:
        """Return a new model."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def compile(self) -> dict[str, Any]:
        """Return the arguments of ``model.compile`` except the optimizer, with the loss."""
        ...
