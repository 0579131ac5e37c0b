"""The one small network that every framework trains in the tests: its data and its first weights.

logits = tanh(x @ w1 + b1) @ w2 + b2, trained with cross-entropy. Only NumPy here.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

NUM_SAMPLES = 50  # not divisible by any global batch used: the last batch of an epoch is short
NUM_EVAL_SAMPLES = 23
BATCH_SIZE = 4
# Without the product, which is not installed where a saved model is loaded.
RANK = int(
    next((os.environ[name] for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ), "0")
)
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


class Slow(Samples):
    """The same samples, slower to read; reading one of them so often ends rank 1 with signal 9."""

    def __init__(self, num_samples: int, pause_s: float, kill_after: int) -> None:
        super().__init__(num_samples, 1)
        self.pause_s = pause_s
        self.kill_after = kill_after
        self.num_reads = 0

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.pause_s)
        self.num_reads += 1
        if self.num_reads == self.kill_after and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def pair(row: Any) -> Any:
    """Return the sample (x, y) of a row of arrays."""
    kill_rank_0()
    return row["x"], row["y"]


def dictionary(row: Any) -> Any:
    """Return the sample of Transformers of a row of arrays."""
    kill_rank_0()
    return {"x": row["x"], "labels": int(row["y"])}


def kill_rank_0() -> None:
    """End rank 0 with signal 9, after this process, or loader process, has read some samples.

    Frameworks read ahead: there must be a checkpoint, too.
    """
    KILL["reads"] += 1
    if RANK or not KILL["after"] or KILL["reads"] < KILL["after"]:
        return
    if any(Path(os.environ["CHECKPOINTS"]).glob("step-*")):
        loader_of = multiprocessing.parent_process()
        Path(os.environ["KILLED"]).touch()
        os.kill(os.getpid() if loader_of is None else loader_of.pid, signal.SIGKILL)


KILL = {"reads": 0, "after": int(os.environ.get("KILL_AFTER", "0"))}


class NumpyTask:
    """The data of a task whose samples are NumPy arrays.

    Args:
        num_samples: Training samples.
        huge: See ``Samples``.
        dropout: Fraction of hidden values that training leaves out.
        pause_s: Time that it takes to read a training sample.
        kill_after: Reads of training samples until rank 1 is gone; 0: it stays.
    """

    def __init__(
        self,
        num_samples: int = NUM_SAMPLES,
        huge: float | None = None,
        dropout: float = 0.0,
        pause_s: float = 0.0,
        kill_after: int = 0,
    ) -> None:
        self.num_samples = num_samples
        self.huge = huge
        self.dropout = dropout
        self.pause_s = pause_s
        self.kill_after = kill_after

    def train_data(self) -> Any:
        if self.pause_s:
            return Slow(self.num_samples, self.pause_s, self.kill_after)
        return Samples(self.num_samples, 1, self.huge)

    def eval_data(self) -> Any:
        return Samples(NUM_EVAL_SAMPLES, 2)
