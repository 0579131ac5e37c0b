r"""Cosine: half a wave from the peak rate to ``end_factor`` at the end of training.

Source: Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983, without
restarts.
"""

from __future__ import annotations

import math

from horovod_train.config.optimization import LearningRate
from horovod_train.lr.schedules.base import Position


def factor(position: Position, lr: LearningRate) -> float:
    """Return f + (1 - f) (1 + cos(pi t)) / 2, with f = end_factor and the progress t.

    >>> factor(Position(5, 0, 10), LearningRate(decay="cosine", end_factor=0.5))
    0.75
    """
    return half_wave(position.progress, lr.end_factor)


def half_wave(t: float, end: float) -> float:
    """Return the cosine curve from 1 at t = 0 to ``end`` at t = 1."""
    return end + (1 - end) * (1 + math.cos(math.pi * t)) / 2
