"""Position in a training, from which schedules compute their factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Progress of a training.

    Attributes:
        epochs: Epochs passed, including the fraction of the current epoch.
        warmup_epochs: Length of the warm-up, at its scaled length.
        total_epochs: Length of the whole training.
    """

    epochs: float
    warmup_epochs: float
    total_epochs: float

    @property
    def progress(self) -> float:
        """Progress since the end of warm-up, from 0 to 1.

        >>> Position(6.0, 2.0, 10.0).progress, Position(12.0, 2.0, 10.0).progress
        (0.5, 1.0)
        """
        length = self.total_epochs - self.warmup_epochs
        return min(1.0, max(0.0, (self.epochs - self.warmup_epochs) / length)) if length > 0 else 1.0


ROUNDING = 1e-9
"""Relative error of sums of fractions of epochs."""


def has_passed(position: float, epochs: float) -> bool:
    """Return whether a position has passed, also if rounding makes it a little later.

    >>> has_passed(5 / 3, 1 + 2 / 3)
    True
    """
    return position <= epochs * (1 + ROUNDING)


def interpolated(points: Sequence[Sequence[float]], epochs: float) -> float:
    """Return the value of a piecewise linear curve, which is constant before and after its points.

    >>> [interpolated([[0, 1.0], [10, 0.5], [10, 0.1]], epochs) for epochs in (-1, 5, 10, 11)]
    [1.0, 0.75, 0.1, 0.1]
    """
    before = [point for point in points if has_passed(point[0], epochs)]
    after = points[len(before) :]
    if not before or not after:
        return float(before[-1][1] if before else after[0][1])
    (start, low), (end, high) = before[-1], after[0]
    return float(low + (high - low) * (epochs - start) / (end - start))
