"""Floating-point operations of a step: counted in one step, then scaled by the samples of each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.flop_counter import FlopCounterMode

SETTLED_AFTER_STEPS = 2
"""First step that is counted: the step before it may run additional initialization."""


class FlopCounter:
    """Counter of a step's operations in attention, convolutions and matrix products (``FlopCounterMode``)."""

    def __init__(self, *, is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled
        self._num_steps = 0
        self._num_samples = 0
        self._per_sample: float | None = None

    @contextmanager
    def counting(self, num_samples: int) -> Iterator[None]:
        """Record the number of samples of a step; in one step, count the operations of the block."""
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
        """Return the number of operations of the step; None: no step was counted, or it counted none."""
        return self._per_sample * self._num_samples if self._per_sample else None
