"""Human-readable reports of training progress."""

from __future__ import annotations

import math
from collections import deque
from time import monotonic

from horovod_train.events.types import Evaluation, Notice, Progress
from horovod_train.events.wire import Reporter
from horovod_train.telemetry.catalog import shown_numbers
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.run import Run

MAX_UNUSED_REPORTS = 20
"""Maximum number of messages about unused steps; a metric counts all of these steps."""


class ReportProgress(Hook):
    """Reports progress and evaluations on rank 0, and steps that were not used."""

    WINDOW_S = 10.0

    def __init__(self, reporter: Reporter, interval_s: float) -> None:
        self._reporter = reporter
        self._interval_s = interval_s
        self._next = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._samples = 0
        self._num_steps = 0
        self._num_not_used = 0
        self._unreported: tuple[float, StepReport] | None = None

    @classmethod
    def of(cls, parts: HookParts) -> ReportProgress:
        """Return the hook."""
        return cls(parts.reporter, parts.report_interval_s)

    def on_start(self, run: Run) -> None:
        """Start to count steps and samples."""
        self._num_steps = run.planned_steps()
        self._recent.append((monotonic(), 0))

    def on_reading(self, run: Run, report: StepReport) -> None:
        """Report an unused step; report progress when the interval has passed."""
        self._samples += report.share.num_samples
        if not report.outcome.is_finite:
            self._report_unused(run, report)
        now_s = monotonic()
        self._unreported = now_s, report
        if now_s >= self._next and run.world.rank == 0:
            self._next = now_s + self._interval_s
            self._report(run, now_s, report)

    def on_end(self, run: Run) -> None:
        """Report the last step, regardless of the time of the previous report."""
        if self._unreported is not None and run.world.rank == 0:
            self._report(run, *self._unreported)

    def _report_unused(self, run: Run, report: StepReport) -> None:
        """Report an unused step on rank 0, and on ranks with a local loss that is not finite."""
        loss, local_loss = report.outcome.loss, report.outcome.local_loss
        is_ours, is_loss = not math.isfinite(local_loss), not math.isfinite(loss)
        is_search = run.job.train.precision == "fp16" and not is_loss  # search for the loss scale
        if is_search or not (run.world.rank == 0 or is_ours) or self._num_not_used >= MAX_UNUSED_REPORTS:
            return
        self._num_not_used += 1
        what = "a gradient is not finite"
        if is_loss:
            what = f"the loss is {loss:g}, this rank's part of it {local_loss:g}"
        self._reporter.report(Notice(text=f"step {report.step} was not used: {what}"))

    def _report(self, run: Run, now_s: float, report: StepReport) -> None:
        self._unreported = None
        if run.policy.scaled.follows_gain:  # the number of steps depends on the gains that are measured
            self._num_steps = run.planned_steps()
        self._recent.append((now_s, self._samples))
        while len(self._recent) > 2 and now_s - self._recent[0][0] > self.WINDOW_S:
            self._recent.popleft()
        since_s, before = self._recent[0]
        samples_per_s = (self._samples - before) / max(1e-9, now_s - since_s)
        has_unknown_length = run.is_open_ended or run.policy.scaled.follows_gain
        samples_left = max(0, self._num_steps - report.step) * run.global_batch_size
        self._reporter.report(
            Progress(
                step=report.step,
                num_steps=self._num_steps,
                epoch=int(report.epochs_passed)
                if has_unknown_length
                else min(int(report.epochs_passed), run.num_epochs - 1),
                num_epochs=0 if has_unknown_length else run.num_epochs,
                loss=report.outcome.loss,
                lr=report.lr,
                samples_per_s=samples_per_s,
                eta_s=samples_left / samples_per_s if self._num_steps else None,
                numbers=shown_numbers(report.numbers),
            )
        )

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """Report the results of an evaluation."""
        if not begins and run.world.rank == 0:
            progress = run.progress
            self._reporter.report(
                Evaluation(
                    epoch=progress.epoch,
                    metrics=progress.metrics,
                    step=progress.step,
                    is_within_epoch=progress.cursor > 0,
                )
            )

    def on_step(self, run: Run) -> None:
        """Report that an evaluation within an epoch has stopped training."""
        if not run.is_epoch_complete:
            self._report_early_stop(run)

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        """Report that the evaluation of an epoch has stopped training."""
        self._report_early_stop(run)

    def _report_early_stop(self, run: Run) -> None:
        rule = run.job.evaluation.early_stopping
        if rule and run.world.rank == 0 and run.progress.stopped_early and run.progress.current_metrics:
            text = f"stopping early: {rule.metric} did not improve in {rule.patience} evaluations"
            self._reporter.report(Notice(text=text))
