"""Comparisons of the gradient of all ranks with that of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from horovod_train.data.shard import StepShare, epoch_order
from horovod_train.errors import UserError
from horovod_train.events.types import ComparedWithOneProcess
from horovod_train.events.wire import Reporter
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.run import Run

MAX_INTERVAL_STEPS = 1000
"""Largest number of steps between two comparisons."""
MAX_PER_PART = 4
"""Largest number of samples of a part."""


class GradientComparison(Protocol):
    """Compares gradients (``torch/verify/one_process.py``)."""

    def compare(self, step: int, parts: Sequence[Sequence[int]]) -> str | None:
        """Compare on two parts of the samples of a step; raises ``UserError`` for a refused difference.

        Returns:
            What differs, or why nothing is compared; None: the gradients are equal; empty: they are not
            finite in this step.
        """


@runtime_checkable
class ComparesGradients(Protocol):
    """A replica whose gradients may be compared with those of one process."""

    one_process: GradientComparison | None


class CompareWithOneProcess(Hook):
    """Compares after steps 1, 2, 4, 8, ..., and then after every 1,000 steps, and reports the result."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._num_steps, self._next = 0, 1.0
        self._share: StepShare | None = None

    @classmethod
    def of(cls, parts: HookParts) -> CompareWithOneProcess | None:
        """Return the hook, unless the job disables it or has one rank."""
        is_wanted = parts.job.health.one_process != "off" and parts.world.size > 1
        return cls(parts.reporter) if is_wanted else None

    def on_reading(self, run: Run, report: StepReport) -> None:
        """Record which samples a step had; on a device, it is not the last one."""
        self._share = report.share

    def on_step(self, run: Run) -> None:
        """Compare, if it is due and the replica supports it."""
        self._num_steps += 1
        replica = run.replica
        if not isinstance(replica, ComparesGradients) or replica.one_process is None or self._share is None:
            return
        if self._num_steps < self._next:
            return
        self._next = self._num_steps + min(self._num_steps, MAX_INTERVAL_STEPS)
        if all(parts := _samples(run, self._share)) and self._compare(run, replica.one_process, parts):
            self._next = math.inf  # a difference is told once

    def _compare(self, run: Run, comparison: GradientComparison, parts: Sequence[Sequence[int]]) -> str:
        """Compare, and report the result on rank 0; return what differs."""
        step = run.progress.step
        try:
            found = comparison.compare(step, parts)
        except UserError as error:
            self._report_result(run, step, str(error))
            raise
        if found != "":
            self._report_result(run, step, found or "")
        return found or ""

    def _report_result(self, run: Run, step: int, text: str) -> None:
        if run.world.rank == 0:
            self._reporter.report(ComparedWithOneProcess(step=step, text=text))


def _samples(run: Run, share: StepShare) -> list[list[int]]:
    """Return the samples of a step in two parts: others in each step, in the order of the step."""
    order = run.progress.order
    places = epoch_order(order.num_samples, order.seed, run.progress.epoch, shuffle=order.shuffle)
    of_step = places[share.cursor : share.cursor + share.num_samples]
    chosen = np.random.default_rng(share.cursor + run.progress.step).permutation(len(of_step))
    half = len(chosen) // 2
    size = min(half, MAX_PER_PART)
    return [of_step[np.sort(part[:size])].tolist() for part in (chosen[:half], chosen[half:])]
