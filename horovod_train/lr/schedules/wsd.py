"""Warm-up, stable, decay (WSD): the peak rate, and a decrease in the last ``cooldown_fraction`` of training.

Sources: Hu et al., "MiniCPM", arXiv:2404.06395; the shape 1 - sqrt: Haegele et al., "Scaling Laws and
Compute-Optimal Training Beyond Fixed Training Durations", arXiv:2405.18392.
"""

from __future__ import annotations

import math

from horovod_train.config.optimization import LearningRate
from horovod_train.lr.schedules.base import Position


def factor(position: Position, lr: LearningRate) -> float:
    """Return 1, or f + (1 - f) (1 - s(x)) in the decrease, with its progress x and s(x) = x or sqrt(x).

    >>> lr = LearningRate(decay="wsd", cooldown_fraction=0.5, cooldown_shape="linear")
    >>> [factor(Position(epochs, 0, 8), lr) for epochs in (2, 4, 6, 8)]
    [1.0, 1.0, 0.5, 0.0]
    """
    length = lr.cooldown_fraction * position.total_epochs
    x = min(1.0, max(0.0, (position.epochs - (position.total_epochs - length)) / length))
    shape = math.sqrt(x) if lr.cooldown_shape == "sqrt" else x
    return lr.end_factor + (1 - lr.end_factor) * (1 - shape)
