"""Experiment trackers of the job, which receive losses and metrics on rank 0."""

from __future__ import annotations

from horovod_train.telemetry.catalog import shown_numbers
from horovod_train.telemetry.tracking import Trackers, open_trackers
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.run import Run


class Track(Hook):
    """Passes results of steps and evaluations to trackers."""

    def __init__(self, trackers: Trackers) -> None:
        self._trackers = trackers

    @classmethod
    def of(cls, parts: HookParts) -> Track | None:
        """Return the hook; None: a rank other than 0, or a job without trackers.

        Raises:
            UserError: A tracker cannot be created.
        """
        if parts.world.rank != 0:
            return None
        trackers = open_trackers(
            parts.job, parts.run_id, parts.world.size, parts.reporter, parts.recorder, parts.at_end
        )
        if trackers is None:
            return None
        parts.reporter.observers.append(trackers.observe)
        return cls(trackers)

    def on_start(self, run: Run) -> None:
        """Start the trackers."""
        self._trackers.start(run.progress.step)

    def on_reading(self, run: Run, report: StepReport) -> None:
        """Log the result of a step."""
        outcome = report.outcome
        values = {"loss": outcome.loss, "lr": report.lr, **shown_numbers(report.numbers)}
        if outcome.grad_norm is not None:
            values["grad_norm"] = outcome.grad_norm
        self._trackers.log_step(report.step, report.epochs_passed, values)

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """Log the metrics of an evaluation."""
        if not begins:
            progress = run.progress
            self._trackers.log_evaluation(progress.step, progress.epochs_passed, progress.metrics)
