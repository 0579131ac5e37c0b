"""Tasks in NumPy, whose ranks start in a second: to be interrupted, to fail, or to be looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.horovod.mpi import number_of

RANK = number_of(os.environ, "rank", alone=0)


class Numbered:
    """Samples that say which one they are; with random augmentation, as real data has."""

    def __init__(self, num_samples: int, *, noisy: bool) -> None:
        make = np.random.RandomState(3)
        self.inputs = make.randn(num_samples, 6)
        self.labels = make.randint(3, size=num_samples)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        noise = 0.01 * np.random.randn(6) if self.noisy else 0.0
        return index, self.inputs[index] + noise, self.labels[index]


class Noted:
    """Softmax regression with dropout that notes every sample it trains on.

    Args:
        notes: Folder for the notes, one file per rank and process.
        kill: "rank:call": the rank to kill with signal 9, at its so-manieth call of ``gradient``.
        num_samples: Size of the training data.
        pause_s: Time that a call takes at least.
        chatter: Bytes that a call prints.
        curriculum: Growth of the inputs with each call, whose progress only Python has.
    """

    FLOPS_PER_SAMPLE = 2 * 6 * 3 * 2  # forward, and the gradient of the weights

    def __init__(
        self,
        notes: str,
        kill: str = "",
        num_samples: int = 60,
        pause_s: float = 0.0,
        chatter: int = 0,
        curriculum: float = 0.0,
    ) -> None:
        self.notes = Path(notes) / f"rank-{RANK}-{os.getpid()}.txt"
        self.kill = tuple(map(int, kill.split(":"))) if kill else (-1, -1)
        self.num_samples = num_samples
        self.pause_s = pause_s
        self.chatter = chatter
        self.curriculum = curriculum
        self.calls = 0

    def model(self) -> Any:
        return {"weight": 0.1 * np.random.randn(6, 3), "bias": np.zeros(3)}

    def train_data(self) -> Numbered:
        return Numbered(self.num_samples, noisy=True)

    def eval_data(self) -> Numbered:
        return Numbered(17, noisy=False)

    def gradient(self, params: Any, batch: Any) -> Any:
        index, inputs, labels = batch
        self.calls += 1
        with self.notes.open("a") as file:
            file.write(" ".join(map(str, index.tolist())) + "\n")
        if (RANK, self.calls) == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.pause_s)
        if self.chatter:
            print("x" * self.chatter)
        inputs = inputs * (np.random.rand(*inputs.shape) > 0.3) * (1 + self.curriculum * self.calls)
        chances = softmax(params, inputs)
        rows = np.arange(len(labels))
        errors = chances.copy()
        errors[rows, labels] -= 1
        errors /= len(labels)
        return -np.log(chances[rows, labels]).mean(), {"weight": inputs.T @ errors, "bias": errors.sum(0)}

    def metrics(self, params: Any, batch: Any) -> Any:
        _, inputs, labels = batch
        return {"loss": -np.log(softmax(params, inputs)[np.arange(len(labels)), labels])}


def softmax(params: Any, inputs: np.ndarray) -> np.ndarray:
    scores = inputs @ params["weight"] + params["bias"]
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


class Failing(Noted):
    """Goes wrong in some way, on one rank or on all."""

    def __init__(self, notes: str, how: str, rank: int, **args: Any) -> None:
        super().__init__(notes, **args)
        self.how = how if rank in (RANK, -1) else "not at all"
        if self.how == "in the constructor":
            raise ValueError("no such data set")

    def gradient(self, params: Any, batch: Any) -> Any:
        loss, gradients = super().gradient(params, batch)
        if self.calls != 3:
            return loss, gradients
        if self.how == "raise":
            print("reading shard 17 ... ", end="", flush=True)  # its line is never ended
            raise ValueError("label 11 is out of range")
        if self.how == "stay away":
            time.sleep(600)
        if self.how == "nan":
            return float("nan"), gradients
        if self.how == "drift":
            params["weight"] = params["weight"] + 1e-7
        if self.how == "sys.exit":
            sys.exit(0)
        if self.how == "os._exit":
            os._exit(0)
        if self.how == "interrupt":
            raise KeyboardInterrupt
        return loss, gradients


class Leaving(Noted):
    """Starts a program that outlives it and holds its output open, as a tracking daemon would."""

    def __init__(self, notes: str, **args: Any) -> None:
        super().__init__(notes, **args)
        # Not waited for, on purpose.
        subprocess.Popen(["sleep", "600"], start_new_session=True)


class Differing(Noted):
    """Makes a model that depends on the rank."""

    def model(self) -> Any:
        return {"weight": np.zeros((6, 3 + RANK)), "bias": np.zeros(3 + RANK)}


class Unsorted(Noted):
    """Has the same samples on each rank, in another order."""

    def train_data(self) -> Numbered:
        data = super().train_data()
        data.inputs = np.roll(data.inputs, RANK, axis=0)
        return data


class Wide(Noted):
    """Makes a larger model than ``Noted``."""

    def model(self) -> Any:
        return {"weight": np.zeros((6, 5)), "bias": np.zeros(5)}
