"""Stages of a pipeline, and the smaller pieces of a model that form them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

Balance = Literal["parameters", "time"]
NUM_TIMED = 3
"""Number of timed runs of the example; the shortest time is used."""


@dataclass(frozen=True)
class Stage:
    """Stage of a pipeline.

    Attributes:
        call: Receives the values from the previous stage (first stage: the model's inputs by name); returns
            a tuple of values for the next stage (last stage: the model's output).
        names: Names of the modules, parameters and buffers of the model that the stage uses.
        first: Name of the module that the stage calls first, and number of calls of this module in previous
            stages of the same forward pass; None: the stage calls no module.
        is_random: Whether the stage draws random numbers.
    """

    call: Callable[..., Any]
    names: frozenset[str]
    first: tuple[str, int] | None = None
    is_random: bool = True

    def owns(self, name: str) -> bool:
        """Return whether the stage uses a parameter or buffer.

        >>> Stage(print, frozenset({"layers.1"})).owns("layers.1.weight")
        True
        >>> Stage(print, frozenset({"layers.1"})).owns("layers.10.weight")
        False
        """
        parts = name.split(".")
        return any(".".join(parts[:length]) in self.names for length in range(1, len(parts) + 1))


@dataclass(frozen=True)
class Pieces:
    """Pieces of a model that are called one after the other; consecutive pieces form a stage.

    Attributes:
        costs: Cost of each piece.
        widths: Number of values that cross each allowed cut, by the number of pieces before it.
        join: Returns the stage of pieces ``[first, last)``.
    """

    costs: Sequence[float]
    widths: Mapping[int, int]
    join: Callable[[int, int], Stage]

    def stages(self, cuts: Sequence[int]) -> list[Stage]:
        """Return the stages between cuts; a cut is the number of pieces before it."""
        bounds = [0, *cuts, len(self.costs)]
        return [self.join(first, last) for first, last in pairwise(bounds)]
