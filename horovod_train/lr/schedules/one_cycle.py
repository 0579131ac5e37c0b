"""One cycle: the rate rises from ``start_factor`` to the peak, and falls to ``end_factor``, as half waves.

Source: Smith & Topin, "Super-Convergence", arXiv:1708.07120, with the cosine shape of PyTorch's OneCycleLR.
"""

from __future__ import annotations

from horovod_train.config.optimization import LearningRate
from horovod_train.lr.schedules.base import Position
from horovod_train.lr.schedules.cosine import half_wave


def factor(position: Position, lr: LearningRate) -> float:
    """Return the factor; the cycle is the whole training, so that it has no separate warm-up.

    >>> lr = LearningRate(decay="one_cycle", rise_fraction=0.5, start_factor=0.5)
    >>> [round(factor(Position(epochs, 0, 8), lr), 3) for epochs in (0, 2, 4, 6, 8)]
    [0.5, 0.75, 1.0, 0.5, 0.0]
    """
    t, rise = position.progress, lr.rise_fraction
    if t < rise:
        return half_wave(1 - t / rise, lr.start_factor)
    return half_wave((t - rise) / (1 - rise), lr.end_factor)
