"""A task whose ranks fail once each at some steps, in ways that the job says."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

RANK = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


class Samples:
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        x = torch.rand(4, generator=generator, dtype=torch.float64)
        return x, x.sum().sin()


class Fragile:
    """The task.

    Args:
        failures: What happens to which rank at which of its steps: ``{"9": ["kill", 1]}``.
        folder: Folder in which failures are noted: each happens once, unless it is "raise always".
    """

    def __init__(self, failures: dict[str, list[Any]], folder: str) -> None:
        self.failures, self.folder = failures, Path(folder)
        self.step = torch.zeros((), dtype=torch.long)

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1, dtype=torch.float64)
        model.register_buffer("step", torch.zeros((), dtype=torch.long))
        return model

    def train_data(self) -> Any:
        return Samples()

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        if model.training:
            model.step += 1
            self.fail(str(int(model.step)))
        found: torch.Tensor = ((model(x)[:, 0] - y) ** 2).mean()
        return found

    def fail(self, step: str) -> None:
        how, rank = self.failures.get(step, ["", -1])
        noted = self.folder / f"failed-{step}"
        if str(rank) != RANK or noted.exists():
            return
        if how != "raise always":
            noted.touch()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            signal.pause()
        if how.startswith("raise"):
            raise OSError(f"the disk has failed at step {step}")
