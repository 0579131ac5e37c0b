"""What a model is cut into: pieces, of which neighbours make a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

Balance = Literal["parameters", "time"]
NUM_TIMED = 3
"""So often the example is computed to see how long it takes; the shortest counts."""


@dataclass(frozen=True)
class Stage:
    """A part of a model.

    Attributes:
        call: Takes what crosses from the stage before (of the first, the model's inputs by name), and returns
            a tuple of what crosses to the next, or what the model returns, of the last.
        names: Names of the model's modules, parameters and buffers that it uses.
        first: Name of the module that it calls first, and how often the model has called that before in a
            forward pass; None: it calls none.
        is_random: It draws random numbers.
    """

    call: Callable[..., Any]
    names: frozenset[str]
    first: tuple[str, int] | None = None
    is_random: bool = True

    def owns(self, name: str) -> bool:
        """Whether a parameter or buffer is used here.

        >>> Stage(print, frozenset({"layers.1"})).owns("layers.1.weight")
        True
        >>> Stage(print, frozenset({"layers.1"})).owns("layers.10.weight")
        False
        """
        parts = name.split(".")
        return any(".".join(parts[:length]) in self.names for length in range(1, len(parts) + 1))


@dataclass(frozen=True)
class Pieces:
    """A model in pieces that are called one after the other: stages are made of neighbours.

    Attributes:
        costs: Of each piece.
        widths: How many values cross behind each piece but the last, if a stage may end there.
        join: Returns the stage made of pieces ``[first, last)``.
    """

    costs: Sequence[float]
    widths: Mapping[int, int]
    join: Callable[[int, int], Stage]

    def stages(self, cuts: Sequence[int]) -> list[Stage]:
        """Return the stages that end behind so many pieces each, and the last one."""
        bounds = [0, *cuts, len(self.costs)]
        return [self.join(first, last) for first, last in pairwise(bounds)]
