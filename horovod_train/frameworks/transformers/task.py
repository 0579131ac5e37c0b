"""Interface of a task for Transformers.

class MyTask:
    def model(self): ...            a model that returns its loss if a batch contains labels
    def train_data(self): ...       a dataset of dictionaries with __len__ and __getitem__

    def eval_data(self): ...        optional: data for evaluation
    def collate(self, samples): ... optional: joins samples into a batch, such as a data collator
    def metrics(self, found): ...   optional: {name: value} of an EvalPrediction over all samples
    def callbacks(self): ...        optional: a list of TrainerCallbacks

The job sets the optimizer and its learning rate.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

REQUIRED = ("model", "train_data")
OPTIONAL = ("eval_data", "collate", "metrics", "callbacks")


class TransformersTask(Protocol):
    """The required methods of a task."""

    def model(self) -> torch.nn.Module:
        """Return a new model."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...
