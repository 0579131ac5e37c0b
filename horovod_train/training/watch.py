"""Steps of a user's own loop: looked at and recorded when it is known what they turned out to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from horovod_train.errors import NumericError
from horovod_train.health.finite import FiniteGuard
from horovod_train.telemetry.recorder import Recorder
from horovod_train.training.parts import record_step
from horovod_train.training.pending_steps import PendingSteps, StepReport


class ResumableReplica(Protocol):
    """A replica that holds updates back after a step that ends training."""

    def resume_updates(self) -> None:
        """Make updates again."""
        ...


@dataclass
class StepWatch:
    """Looks at each step of a replica when it is known what it turned out to be."""

    _replica: ResumableReplica
    _guard: FiniteGuard
    _pending_steps: PendingSteps

    def add(self, report: StepReport) -> None:
        """Add a step, and look at those that are due.

        Raises:
            NumericError: One was not finite, and may not be skipped.
        """
        self._pending_steps.add(report)
        self._look_at(self._pending_steps.ready())

    def flush(self) -> None:
        """Look at all steps; raises as ``add`` does."""
        self._look_at(self._pending_steps.all())

    def start_again(self) -> None:
        """Training continues from elsewhere: look at all steps before, and count again."""
        self.flush()
        self._guard.reset()

    def _look_at(self, reports: Iterator[StepReport]) -> None:
        for report in reports:
            found = report.outcome
            try:
                self._guard.check(
                    report.step, is_finite=found.is_finite, loss=found.loss, local_loss=found.local_loss
                )
            except NumericError:
                # A loop that continues does so from here: later steps were skipped.
                self._replica.resume_updates()
                self._pending_steps.clear()
                raise


class StepRecords:
    """Records steps as metrics, when it is known what they turned out to be.

    Args:
        recorder: Gets them.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pending_steps: PendingSteps | None = None

    def add(self, report: StepReport, *, lag_steps: int) -> None:
        """Add a step; record those that are due."""
        if self._pending_steps is None:
            self._pending_steps = PendingSteps(lag_steps)
        self._pending_steps.add(report)
        self._record(self._pending_steps.ready())

    def close(self) -> None:
        """Record the last steps, those that come; whatever goes wrong, what is going on has the word."""
        if self._pending_steps is not None:
            with suppress(Exception):
                self._record(self._pending_steps.drain())

    def _record(self, reports: Iterator[StepReport]) -> None:
        for report in reports:
            if report.outcome.was_executed:
                step, epochs = report.step, report.epochs_passed
                record_step(self._recorder, report.share, report.outcome, report.lr, step, epochs)
