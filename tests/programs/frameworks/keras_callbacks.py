"""Callbacks of Keras that a user brings along."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np


class Keeps(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.setting = 5
        self.num_batches = 0
        self.best = np.float32(np.inf)
        self.history: list[tuple[int, np.ndarray]] = []
        self.numbers = itertools.count()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.best = min(self.best, np.float32(logs["val_loss"]))
        self.history.append((epoch, np.array([logs["val_loss"], self.num_batches])))


class ChangesAtTheEnd(keras.callbacks.Callback):
    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights([0 * each for each in self.model.get_weights()])


class SetsTheRate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.5

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.model.optimizer.learning_rate = 0.5


def make() -> list[Any]:
    return [Keeps(), Keeps()]


def state(callbacks: list[Any]) -> Any:
    return [
        [each.setting, each.num_batches, float(each.best), [[e, a.tolist()] for e, a in each.history]]
        for each in callbacks
    ]


def changing_at_the_end() -> list[Any]:
    return [ChangesAtTheEnd()]


def setting_the_rate() -> list[Any]:
    return [SetsTheRate()]


class MyCheckpoint(keras.callbacks.ModelCheckpoint):
    pass


def refused() -> list[Any]:
    return [
        MyCheckpoint("/nowhere/{epoch}.keras"),
        keras.callbacks.BackupAndRestore("/nowhere"),
        keras.callbacks.EarlyStopping(restore_best_weights=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr),
        keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.SwapEMAWeights(),
    ]
