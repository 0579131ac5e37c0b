"""Callbacks of Lightning that a user brings along, and a module with hooks of its own."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from frameworks import lightning_task
from lightning.pytorch import callbacks as of_lightning


class Keeps(lightning.Callback):
    def __init__(self) -> None:
        self.num_batches = 0
        self.mean = torch.zeros(2)
        self.extra: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.num_batches += 1

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.mean = self.mean / 2 + self.num_batches
        self.extra.append(trainer.current_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_batches, self.mean = state["num_batches"], torch.as_tensor(state["mean"])

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = list(self.extra)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.extra = list(checkpoint["extra"])


class KeepsToo(Keeps):
    pass


class Module(lightning_task.Module):
    num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        raise AssertionError

    def configure_callbacks(self) -> Any:
        return [OfModule(self)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_steps"] = self.num_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert "state_dict" in checkpoint
        self.num_steps = checkpoint["num_steps"]


class OfModule(lightning.Callback):
    def __init__(self, module: Any) -> None:
        self.module = module

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        SEEN.append(module.num_steps)


SEEN: list[int] = []
lightning_task.Task.model = lambda self: Module(self.dropout)  # type: ignore[method-assign]


class ChangesAtTheEnd(lightning.Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.data.zero_()


class SetsTheRate(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.5


def make() -> list[Any]:
    SEEN.clear()
    return [Keeps(), KeepsToo()]


def state(callbacks: list[Any]) -> Any:
    return [SEEN[-1], *([each.num_batches, each.mean.tolist(), each.extra] for each in callbacks[:2])]


def changing_at_the_end() -> list[Any]:
    return [ChangesAtTheEnd()]


def setting_the_rate() -> list[Any]:
    return [SetsTheRate()]


class MyCheckpoint(of_lightning.ModelCheckpoint):
    pass


def refused() -> list[Any]:
    return [
        MyCheckpoint("/nowhere"),
        of_lightning.EMAWeightAveraging(),
        of_lightning.WeightAveraging(),
        of_lightning.StochasticWeightAveraging(0.1),
        of_lightning.GradientAccumulationScheduler({0: 2}),
        of_lightning.LearningRateFinder(),
        of_lightning.BatchSizeFinder(),
        of_lightning.BackboneFinetuning(),
        of_lightning.ModelPruning("l1_unstructured", amount=0.5),
        of_lightning.LearningRateMonitor(),
        of_lightning.DeviceStatsMonitor(),
        of_lightning.TQDMProgressBar(),
        of_lightning.ModelSummary(),
    ]
