"""Schedules of an optimizer's arguments, such as momentum and weight decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from horovod_train.config.duration import Duration
from horovod_train.lr.schedules import interpolated, valid
from horovod_train.registry import SCHEDULES, load_location


class ArgumentSchedules:
    """Values of an optimizer's arguments as functions of the progress.

    Args:
        schedules: Points (position, value), or the location of a function of the progress from 0 to 1, by
            name.
        total_epochs: Length of the whole job.
        convert: Converts a position to epochs.

    >>> points = [(Duration(0), 0.5), (Duration(5), 1.0)]
    >>> ArgumentSchedules({"momentum": points}, 10, lambda position: position).at(2.5)
    {'momentum': 0.75}
    """

    def __init__(
        self,
        schedules: Mapping[str, Any],
        total_epochs: float,
        convert: Callable[[Duration], Duration],
    ) -> None:
        self._curves = {
            name: _curve(name, given, total_epochs)
            if isinstance(given, str)
            else partial(interpolated, [(convert(position).epochs, value) for position, value in given])
            for name, given in schedules.items()
        }

    def at(self, epochs: float) -> dict[str, float]:
        """Return the values after a number of epochs, including the fraction of the current epoch.

        Raises:
            UserError: A function of the user returns an invalid number.
        """
        return {name: curve(epochs) for name, curve in self._curves.items()}


def _curve(name: str, given: str, total_epochs: float) -> Callable[[float], float]:
    curve = load_location(given, SCHEDULES)

    def at(epochs: float) -> float:
        progress = min(1.0, epochs / total_epochs)
        return valid(curve(progress), f"optimizer.schedules.{name}: {given}", progress)

    return at
