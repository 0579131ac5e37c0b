"""Inverse square root: the rate falls as 1 / sqrt(epochs) from the end of warm-up.

Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, section 5.3.
"""

from __future__ import annotations

import math

from horovod_train.config.optimization import LearningRate
from horovod_train.lr.schedules.base import Position


def factor(position: Position, lr: LearningRate) -> float:
    """Return sqrt(w / e), with the length w of warm-up and the epochs e passed.

    >>> factor(Position(8, 2, 10), LearningRate(decay="inverse_sqrt", warmup=2))
    0.5
    """
    del lr
    return min(1.0, math.sqrt(position.warmup_epochs / position.epochs)) if position.epochs else 1.0
