"""Polynomial: from the peak rate to ``end_factor`` at the end of training; with power 1, a line."""

from __future__ import annotations

from horovod_train.config.optimization import LearningRate
from horovod_train.lr.schedules.base import Position


def factor(position: Position, lr: LearningRate) -> float:
    """Return f + (1 - f) (1 - t) ** power, with f = end_factor and the progress t.

    >>> factor(Position(5, 0, 10), LearningRate(decay="polynomial", power=2.0))
    0.25
    """
    return float(lr.end_factor + (1 - lr.end_factor) * (1 - position.progress) ** lr.power)
