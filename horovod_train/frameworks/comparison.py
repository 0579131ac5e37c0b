"""Protocols of comparisons of the gradient of all ranks with that of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class GradientComparison(Protocol):
    """Compares gradients (``torch/verify/one_process.py``)."""

    def compare(self, step: int, parts: Sequence[Sequence[int]]) -> None:
        """Compare on samples of two ranks in a step; raises ``UserError`` for a refused difference."""


@runtime_checkable
class ComparesGradients(Protocol):
    """A replica whose gradients may be compared with those of one process."""

    one_process: GradientComparison | None
