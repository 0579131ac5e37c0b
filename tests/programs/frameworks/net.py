"""The one small network that every framework trains in the tests: its data and its first weights.

logits = tanh(x @ w1 + b1) @ w2 + b2, trained with cross-entropy. Only NumPy here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NUM_SAMPLES = 50  # not divisible by any global batch used: the last batch of an epoch is short
NUM_EVAL_SAMPLES = 23
BATCH_SIZE = 4
SHAPES = {"w1": (6, 16), "b1": (16,), "w2": (16, 3), "b2": (3,)}


def start_weights() -> dict[str, np.ndarray]:
    """The same on every rank and in the reference; float32, kernels as [inputs, outputs]."""
    random = np.random.default_rng(7)
    weights = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in SHAPES.items()}
    weights["w1"][0] = 0.0  # so a huge first number of a sample shows in the gradient alone
    return weights


class Samples:
    """Pairs (x, y): x of shape [6] float32, y an int64 in 0..2.

    Args:
        huge: First number of the sample that rank 1 reads in its first step; None: as the others.
    """

    def __init__(self, num_samples: int, seed: int, huge: float | None = None) -> None:
        random = np.random.default_rng(seed)
        self.x = random.normal(size=(num_samples, 6)).astype(np.float32)
        self.y = random.integers(0, 3, num_samples)
        if huge is not None:
            self.x[BATCH_SIZE + 1, 0] = huge

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class NumpyTask:
    """The data of a task whose samples are NumPy arrays."""

    def __init__(self, num_samples: int = NUM_SAMPLES, huge: float | None = None) -> None:
        self.num_samples = num_samples
        self.huge = huge

    def train_data(self) -> Any:
        return Samples(self.num_samples, 1, self.huge)

    def eval_data(self) -> Any:
        return Samples(NUM_EVAL_SAMPLES, 2)
