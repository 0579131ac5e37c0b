"""Tasks for runs that are to be interrupted, to fail, or to be looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

RANK = int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


class Numbered(Dataset[Any]):
    """Samples that say which one they are; with random augmentation, as real data has."""

    def __init__(self, num_samples: int, *, noisy: bool) -> None:
        make = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(num_samples, 6, generator=make)
        self.labels = torch.randint(3, (num_samples,), generator=make)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        noise = 0.01 * torch.randn(6) if self.noisy else 0.0
        return index, self.inputs[index] + noise, self.labels[index]


class Noted:
    """Notes every sample it trains on; can be told to kill one rank at one step.

    Args:
        notes: Folder for the notes, one file per rank and process.
        kill: "rank:call" - the rank to kill with signal 9, at its so-manieth call of ``loss``.
        num_samples: Size of the training data.
    """

    def __init__(self, notes: str, kill: str = "", num_samples: int = 60, pause_s: float = 0.0) -> None:
        self.notes = Path(notes) / f"rank-{RANK}-{os.getpid()}.txt"
        self.kill = tuple(map(int, kill.split(":"))) if kill else (-1, -1)
        self.num_samples = num_samples
        self.pause_s = pause_s
        self.calls = 0

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        )

    def train_data(self) -> Dataset[Any]:
        return Numbered(self.num_samples, noisy=True)

    def eval_data(self) -> Dataset[Any]:
        return Numbered(17, noisy=False)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        index, inputs, labels = batch
        if model.training:
            self.calls += 1
            with self.notes.open("a") as file:
                file.write(" ".join(map(str, index.tolist())) + "\n")
            if (RANK, self.calls) == self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(self.pause_s)
        return functional.cross_entropy(model(inputs), labels)


class Failing(Noted):
    """Goes wrong in some way, on one rank or on all."""

    def __init__(self, notes: str, how: str, rank: int, **args: Any) -> None:
        super().__init__(notes, **args)
        self.how = how if rank in (RANK, -1) else "not at all"
        if self.how == "in the constructor":
            raise ValueError("no such data set")

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        if self.calls == 3 and model.training:
            if self.how == "raise":
                raise ValueError("label 11 is out of range")
            if self.how == "stay away":
                time.sleep(600)
            if self.how == "nan":
                return loss * float("nan")
            if self.how == "drift":
                with torch.no_grad():
                    next(model.parameters()).add_(1e-7)
        return loss


class Leaving(Noted):
    """Starts a program that outlives it and holds its output open, as a tracking daemon would."""

    def __init__(self, notes: str, **args: Any) -> None:
        super().__init__(notes, **args)
        # Not waited for, on purpose.
        subprocess.Popen(["sleep", "600"], start_new_session=True)


class Differing(Noted):
    """Makes a model that depends on the rank."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3 + RANK))
