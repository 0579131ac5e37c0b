"""Reduce on plateau: the rate is reduced when an evaluation metric no longer improves.

The factor depends on evaluations, and is part of the progress of the job (``training/plateau.py``).
"""

from __future__ import annotations

from horovod_train.config.optimization import LearningRate
from horovod_train.lr.schedules.base import Position


def factor(position: Position, lr: LearningRate) -> float:
    """Return 1: the factor of an undisturbed training without a plateau."""
    del position, lr
    return 1.0
