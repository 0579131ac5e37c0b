"""Steps: the rate is multiplied by ``gamma`` at each milestone."""

from __future__ import annotations

from horovod_train.config.optimization import LearningRate
from horovod_train.lr.schedules.base import Position, has_passed


def factor(position: Position, lr: LearningRate) -> float:
    """Return gamma ** (number of milestones passed).

    >>> factor(Position(60, 5, 90), LearningRate(decay="step", milestones=[30, 60], gamma=0.5))
    0.25
    """
    return float(
        lr.gamma ** sum(has_passed(milestone.epochs, position.epochs) for milestone in lr.milestones)
    )
