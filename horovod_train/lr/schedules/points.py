"""Points: a list of [position, factor], with linear interpolation."""

from __future__ import annotations

from horovod_train.config.optimization import LearningRate
from horovod_train.lr.schedules.base import Position, interpolated


def factor(position: Position, lr: LearningRate) -> float:
    """Return the factor between the two nearest points.

    >>> factor(Position(15, 0, 30), LearningRate(decay="points", points=[[10, 1.0], [20, 0.0]]))
    0.5
    """
    return interpolated([(at.epochs, value) for at, value in lr.points], position.epochs)
