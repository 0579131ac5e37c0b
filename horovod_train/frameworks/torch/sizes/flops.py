"""Floating-point operations of a step, counted once and taken as a share of its samples from then on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.flop_counter import FlopCounterMode

SETTLED_AFTER_STEPS = 2
"""The first step may set up things that later ones do not."""


class FlopCounter:
    """Counts the operations of one of the first steps: attention and matrix products, as PyTorch does.

    Args:
        is_enabled: Whether operations are counted.
    """

    def __init__(self, *, is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled
        self._num_steps = 0
        self._num_samples = 0
        self._per_sample: float | None = None

    @contextmanager
    def counting(self, num_samples: int) -> Iterator[None]:
        """Count what the block computes for so many samples, once it is due."""
        self._num_steps += 1
        self._num_samples = num_samples
        is_due = self._per_sample is None and self._num_steps >= SETTLED_AFTER_STEPS
        if not (self._is_enabled and is_due and num_samples):
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self._per_sample = counter.get_total_flops() / num_samples

    def of_step(self) -> float | None:
        """Return the operations of the step; None: not known yet, or none that can be counted."""
        return self._per_sample * self._num_samples if self._per_sample else None
