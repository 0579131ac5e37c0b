"""Interface of a task for Lightning.

class MyTask:
    def model(self): ...        a LightningModule with training_step, and validation_step to evaluate
    def train_data(self): ...   a dataset with __len__ and __getitem__

    def eval_data(self): ...    optional: data for evaluation
    def callbacks(self): ...    optional: a list of Lightning callbacks

The job sets the optimizer and its learning rate: ``configure_optimizers`` is not called.
"""

from __future__ import annotations

from typing import Any, Protocol

import lightning

REQUIRED = ("model", "train_data")
OPTIONAL = ("eval_data", "callbacks")


class LightningTask(Protocol):
    """The required methods of a task."""

    def model(self) -> lightning.LightningModule:
        """Return a new module."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...
