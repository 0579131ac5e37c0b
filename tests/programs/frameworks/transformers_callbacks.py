"""Callbacks of Transformers that a user brings along."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers


class Keeps(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.setting = 5
        self.num_steps = 0
        self.losses: list[float] = []
        self.mean = torch.zeros(2)
        self.numbers = itertools.count()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_steps += 1
        self.mean = self.mean / 2 + self.num_steps

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.losses.append(metrics["eval_loss"])


class KeepsToo(Keeps):
    pass


class ChangesAtTheEnd(transformers.TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter in kwargs["model"].parameters():
            parameter.data.zero_()


class SetsTheRate(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["optimizer"].param_groups[0]["lr"] = 0.5


def make() -> list[Any]:
    return [Keeps(), KeepsToo()]


def state(callbacks: list[Any]) -> Any:
    return [
        [each.setting, each.num_steps, each.losses, torch.as_tensor(each.mean).tolist()] for each in callbacks
    ]


def changing_at_the_end() -> list[Any]:
    return [ChangesAtTheEnd()]


def setting_the_rate() -> list[Any]:
    return [SetsTheRate()]


class MyEarlyStopping(transformers.EarlyStoppingCallback):
    pass


def refused() -> list[Any]:
    return [MyEarlyStopping(), transformers.ProgressCallback()]
