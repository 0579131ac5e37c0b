"""Cosine with warm restarts: half waves, each ``restart_factor`` times as long as the previous one.

Source: Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983.
"""

from __future__ import annotations

import math

from horovod_train.config.optimization import LearningRate
from horovod_train.lr.schedules.base import ROUNDING, Position
from horovod_train.lr.schedules.cosine import half_wave


def factor(position: Position, lr: LearningRate) -> float:
    """Return the cosine curve of the current cycle; the first cycle begins at the end of warm-up.

    >>> lr = LearningRate(decay="cosine_restarts", first_cycle=2, restart_factor=2)
    >>> [round(factor(Position(epochs, 0, 6), lr), 3) for epochs in (0, 1, 2, 4)]
    [1.0, 0.5, 1.0, 0.5]
    """
    length = lr.first_cycle.epochs if lr.first_cycle else position.total_epochs
    at = max(0.0, position.epochs - position.warmup_epochs)
    if lr.restart_factor == 1:
        at -= math.floor(at / length + ROUNDING) * length
    while at >= length * (1 - ROUNDING):
        at -= length
        length *= lr.restart_factor
    return half_wave(max(0.0, at / length), lr.end_factor)
