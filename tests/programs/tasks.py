"""Tasks for runs that are to be interrupted, to fail, or to be looked at."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from horovod_train.horovod.mpi import number_of

RANK = number_of(os.environ, "rank", alone=0)


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
        curriculum: Growth of the inputs with each call, whose progress only Python has.
    """

    def __init__(
        self,
        notes: str,
        kill: str = "",
        num_samples: int = 60,
        pause_s: float = 0.0,
        curriculum: float = 0.0,
    ) -> None:
        self.notes = Path(notes) / f"rank-{RANK}-{os.getpid()}.txt"
        self.kill = tuple(map(int, kill.split(":"))) if kill else (-1, -1)
        self.num_samples = num_samples
        self.pause_s = pause_s
        self.curriculum = curriculum
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
            inputs = inputs * (1 + self.curriculum * self.calls)
        return functional.cross_entropy(model(inputs), labels)


class Aborting(Noted):
    """Calls MPI_Abort on rank 1 in its third step."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        if RANK == 1 and self.calls == 3:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(5)
        return loss


class Failing(Noted):
    """Stays away from its third step on one rank, while the others wait for it."""

    def __init__(self, notes: str, how: str, rank: int, **args: Any) -> None:
        super().__init__(notes, **args)
        if how != "stay away":
            raise ValueError(f"the torch task can only stay away, not {how}")
        self.missing_ranks = rank == RANK

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        if self.calls == 3 and model.training and self.missing_ranks:
            time.sleep(600)
        return loss
