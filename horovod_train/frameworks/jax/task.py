"""Interface of a task for JAX.

class MyTask:
    def model(self, rng): ...                  initial parameters: any tree of arrays
    def train_data(self): ...                  samples: __len__ and __getitem__, NumPy arrays
    def loss(self, params, batch, rng): ...    mean loss over the samples of a batch

    def eval_data(self): ...                   optional: data for evaluation
    def metrics(self, params, batch): ...      optional: {name: one value per sample}

``loss`` and ``metrics`` are compiled with ``jax.jit``. ``rng`` is a new key for each micro-batch of each
rank; with ``train.randomness: sample``, it contains a key for each sample, shape [samples, 2], for
``jax.vmap``. An evaluation without ``metrics`` calls ``loss`` with ``rng=None``.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

REQUIRED = ("model", "train_data", "loss")
OPTIONAL = ("eval_data", "metrics")


class JaxTask(Protocol):
    """The required methods of a task."""

    def model(self, rng: jax.Array) -> Any:
        """Return the initial parameters."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def loss(self, params: Any, batch: Any, rng: jax.Array | None) -> jax.Array:
        """Return the mean loss over a batch, shape []."""
        ...
