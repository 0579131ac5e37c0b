"""A task whose weights tell which samples were used: each use adds 1 to the weight of a sample."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.files import decode as sample_of


def decode(sample: Any) -> Any:
    """Return number and array of a stored sample of any format."""
    found = sample_of(sample)
    return {"id": int(found["id"]), "x": found["x"].astype(np.float64)}


def keep(sample: Any) -> bool:
    """Leave out every fourth sample."""
    return int(sample_of(sample)["id"]) % 4 != 0


class Net(torch.nn.Module):
    """The counts, and a linear model whose weights depend on the order of the samples."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.zeros(num_samples, dtype=torch.float64))
        self.linear = torch.nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, batch: Any) -> torch.Tensor:
        x = batch["x"] / 97.0
        error = (self.linear(x)[:, 0] - torch.sin(batch["id"].double())) ** 2
        return 0.01 * error.mean() - self.used[batch["id"]].mean()


class Counted:
    """The task.

    Args:
        num_samples: Samples in all files.
        kill_at: Micro-batches of rank 0 after which it ends itself with signal 9; 0: never.
        noted: File that is created then; a rank that finds it goes on.
    """

    def __init__(self, num_samples: int, kill_at: int = 0, noted: str = "") -> None:
        self.num_samples, self.kill_at, self.noted = num_samples, kill_at, noted
        self._num_batches = 0

    def model(self) -> torch.nn.Module:
        torch.manual_seed(1)
        return Net(self.num_samples)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self._num_batches += 1
        is_first = os.environ.get("HOROVOD_RANK", "0") == "0"
        if self.kill_at and self._num_batches >= self.kill_at and is_first and not Path(self.noted).exists():
            Path(self.noted).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        found: torch.Tensor = model(batch)
        return found
