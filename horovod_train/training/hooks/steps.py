"""Hooks that use the results of steps.

    ReportProgress     human-readable reports of training progress
    RecordMetrics      metrics of this rank for Prometheus
    Track              experiment trackers of the job
    AttributeWaiting   attribution of waiting time to ranks, from the wait and phase times of all ranks
    MeasureNoise       the gradient noise scale and the critical batch size

Experiment trackers receive losses and metrics on rank 0.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from time import monotonic

import numpy as np
import numpy.typing as npt

from horovod_train.config.support import follows_gain
from horovod_train.errors import UserError
from horovod_train.events.types import PHASES, WAIT_PHASE, Evaluation, Notice, Progress, RankTimes
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import MeasuresNoise
from horovod_train.telemetry.catalog import (
    EvaluatingRecord,
    EvaluationRecord,
    GroupNoiseRecord,
    WaitRecord,
    shown_numbers,
)
from horovod_train.telemetry.recorder import Recorder, attribute_waiting, times_interval_s
from horovod_train.telemetry.tracking import Trackers, open_trackers
from horovod_train.training.hooks.base import Hook, HookParts, record_step
from horovod_train.training.noise import MAX_DECAY, remaining_speedup, step_moments
from horovod_train.training.run import Run, StepReport

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
        return cls(parts.reporter, parts.report_interval_s)

    def on_start(self, run: Run) -> None:
        self._num_steps = run.planned_steps()
        self._recent.append((monotonic(), 0))

    def on_result(self, run: Run, report: StepReport) -> None:
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


class RecordMetrics(Hook):
    """Records this rank's Prometheus metrics."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @classmethod
    def of(cls, parts: HookParts) -> RecordMetrics | None:
        return cls(parts.recorder) if parts.job.metrics.enabled else None

    def on_result(self, run: Run, report: StepReport) -> None:
        record_step(self._recorder, report)

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """Record the begin and the end of an evaluation, during which no steps are performed; its results."""
        self._recorder.record(EvaluatingRecord(begins))
        if not begins:
            self._recorder.record(EvaluationRecord(run.progress.metrics))


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
        self._trackers.start(run.progress.step)

    def on_result(self, run: Run, report: StepReport) -> None:
        outcome = report.outcome
        values = {"loss": outcome.loss, "lr": report.lr, **shown_numbers(report.numbers)}
        if outcome.grad_norm is not None:
            values["grad_norm"] = outcome.grad_norm
        self._trackers.log_step(report.step, report.epochs_passed, values)

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        if not begins:
            progress = run.progress
            self._trackers.log_evaluation(progress.step, progress.epochs_passed, progress.metrics)


RANKS_PER_EVENT = 32
"""Ranks in an event, limited because launchers split long lines."""

# Time and number of steps, number of samples, time of each phase; then the step of the first wait time.
_SUMS = struct.Struct(f"<{3 + len(PHASES)}d")
_FIRST = struct.Struct("<q")


class AttributeWaiting(Hook):
    """Exchanges wait times, and computes how long each rank waits and how long others wait for it.

    ``recorder`` receives the times of this rank; on rank 0, ``reporter`` receives those of all ranks.
    """

    def __init__(self, num_ranks: int, rank: int, recorder: Recorder, reporter: Reporter) -> None:
        self._rank = rank
        self._recorder = recorder
        self._reporter = reporter
        self._first_step = 0
        self._wait_times_s: list[float] = []
        self._sums = np.zeros(3 + len(PHASES))
        self._interval_s = times_interval_s(num_ranks)
        self._reported_s = monotonic()
        # A row per rank, since the last report: sums as above, waiting_s, waited_for_s.
        self._of_ranks = np.zeros((num_ranks, self._sums.size + 2))

    @classmethod
    def of(cls, parts: HookParts) -> AttributeWaiting | None:
        """Return the hook; None: the job has no metrics."""
        if not parts.job.metrics.enabled:
            return None
        hook = cls(parts.world.size, parts.world.rank, parts.recorder, parts.reporter)
        parts.exchange.contributions.append(hook)
        return hook

    def on_result(self, run: Run, report: StepReport) -> None:
        clock = report.outcome.clock
        phases = clock.seconds
        sums = self._sums
        sums[0] += clock.total_s
        sums[1] += 1
        sums[2] += report.share.num_local_samples
        for place, phase in enumerate(PHASES, 3):
            if phase in phases:
                sums[place] += phases[phase]
        wait_s = phases.get(WAIT_PHASE)
        if report.step != self._first_step + len(self._wait_times_s) or wait_s is None:
            # The first step, a step without wait time, or a restored checkpoint.
            self._first_step, self._wait_times_s = report.step, []
        if wait_s is not None:
            self._wait_times_s.append(wait_s)

    def payload(self) -> bytes:
        """Return the sums since the last exchange, and the wait times that are not attributed yet."""
        wait_times = np.array(self._wait_times_s, np.float32).tobytes()
        header = _SUMS.pack(*self._sums) + _FIRST.pack(self._first_step) + wait_times
        self._sums[:] = 0
        return header

    def on_gathered(self, of_ranks: Sequence[bytes]) -> None:
        """Attribute the waiting of the steps whose wait times all ranks have sent."""
        if self._rank == 0:
            for rank, message in enumerate(of_ranks):
                self._of_ranks[rank, :-2] += _SUMS.unpack_from(message)
        firsts = [_FIRST.unpack_from(message, _SUMS.size)[0] for message in of_ranks]
        wait_times = [
            np.frombuffer(message, np.float32, offset=_SUMS.size + _FIRST.size) for message in of_ranks
        ]
        begin = max(firsts)
        end = min(first + len(each) for first, each in zip(firsts, wait_times, strict=True))
        if end > begin:
            known = [
                each[begin - first : end - first] for first, each in zip(firsts, wait_times, strict=True)
            ]
            self._attribute(np.stack(known, axis=1).astype(np.float64))
            self._wait_times_s = self._wait_times_s[end - self._first_step :]
            self._first_step = end
        if self._rank == 0 and monotonic() - self._reported_s >= self._interval_s:
            self._report()

    def _attribute(self, wait_times_s: npt.NDArray[np.float64]) -> None:
        waiting, waited_for, communication = attribute_waiting(wait_times_s)
        self._recorder.record(
            WaitRecord(
                waiting_s=float(waiting[self._rank]),
                communication_s=float(communication.sum()),
                waited_for_s=float(waited_for[self._rank]),
            )
        )
        self._of_ranks[:, -2] += waiting
        self._of_ranks[:, -1] += waited_for

    def on_end(self, run: Run) -> None:
        if self._rank == 0:
            self._report()

    def _report(self) -> None:
        """Report the times of all ranks since the last report, in events of 32 ranks."""
        now = monotonic()
        table, self._of_ranks = self._of_ranks, np.zeros_like(self._of_ranks)
        seconds, self._reported_s = now - self._reported_s, now
        if not table[:, 1].any():
            return
        seen = {phase: table[:, place] for place, phase in enumerate(PHASES, 3) if table[:, place].any()}
        has_wait_times = WAIT_PHASE in seen
        for begin in range(0, len(table), RANKS_PER_EVENT):
            part = slice(begin, begin + RANKS_PER_EVENT)
            self._reporter.report(
                RankTimes(
                    first_rank=begin,
                    seconds=round(seconds, 3),
                    steps=tuple(map(int, table[part, 1])),
                    samples=tuple(map(int, table[part, 2])),
                    step_s=_rounded(table[part, 0]),
                    phases_s={phase: _rounded(column[part]) for phase, column in seen.items()},
                    waiting_s=_rounded(table[part, -2]) if has_wait_times else (),
                    waited_for_s=_rounded(table[part, -1]) if has_wait_times else (),
                )
            )


def _rounded(numbers: npt.NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(round(number, 4) for number in numbers.tolist())


MIN_MEASUREMENTS = 20
"""Number of measurements before a warning, because single estimates vary strongly."""


class MeasureNoise(Hook):
    """Measures the gradient noise scale: at an interval for metrics, in each step for AdaScale.

    Estimates are equal on all ranks, because they are computed from sums over ranks.
    """

    def __init__(self, every_steps: int, recorder: Recorder, reporter: Reporter) -> None:
        self._every_steps = every_steps
        self._recorder = recorder
        self._reporter = reporter
        self._warned: set[str] = set()

    @classmethod
    def of(cls, parts: HookParts) -> MeasureNoise | None:
        """Return the hook; None: the job does not need the noise scale."""
        interval = parts.job.metrics.noise_scale_every_steps
        if follows_gain(parts.job.lr.scaling):
            interval = 1  # a setting of metrics must not change the weights
        return None if interval is None else cls(interval, parts.recorder, parts.reporter)

    def on_start(self, run: Run) -> None:
        """Check that a step has at least two parts, and begin to measure.

        Raises:
            UserError: AdaScale cannot measure its gain.
        """
        if run.mesh.data.size * run.job.train.accumulation_steps > 1:
            self.on_step(run)
            return
        text = "the gradient noise scale needs at least two ranks or micro-batches per step"
        if run.policy.scaled.follows_gain and run.policy.scaled.rate > 1:
            raise UserError(
                f"lr.scaling: {run.job.lr.scaling}: {text}",
                hint="use a smaller train.batch_size_per_rank and more train.accumulation_steps",
            )
        if not run.policy.scaled.follows_gain:
            self._reporter.report(Notice(text=f"metrics.noise_scale_every_steps has no effect: {text}"))

    def on_step(self, run: Run) -> None:
        if isinstance(run.replica, MeasuresNoise) and run.replica.noise is not None:
            run.replica.noise.is_due = run.progress.step % self._every_steps == 0

    def on_result(self, run: Run, report: StepReport) -> None:
        """Add the moments of a measured step to the averages."""
        moments = step_moments(report.outcome.numbers, report.share.num_samples)
        if moments is not None and moments.is_valid and report.outcome.is_finite:
            decay = MAX_DECAY
            if run.policy.scaled.follows_gain:  # the decay of the AdaScale paper
                decay = max(0.0, 1 - run.policy.scaled.rate / 1000)
            run.progress.noise = run.progress.noise.with_step(moments, decay)
            self._report(run)
        elif moments is not None and report.outcome.is_finite and not run.progress.noise.num_measured:
            text = "the gradient noise scale is not measured yet: this step had only one part"
            self._warn(run, "one part", text)
        if (found := run.progress.noise.noise_scale) is not None:
            report.derived["noise_scale"] = found  # also of steps that were not measured
        if run.policy.scaled.follows_gain:
            report.derived["adascale_gain"] = run.gain_of(run.global_batch_size)

    def _report(self, run: Run) -> None:
        noise = run.progress.noise
        if run.job.metrics.noise_scale_groups:
            groups = {str(n): found for n, found in enumerate(noise.by_group()) if found is not None}
            self._recorder.record(GroupNoiseRecord(groups))
        is_past = noise.noise_scale is not None and run.global_batch_size > noise.noise_scale
        if is_past and noise.num_measured >= MIN_MEASUREMENTS:
            self._warn(run, "past", past_critical_batch(run, noise.noise_scale or 0.0))

    def _warn(self, run: Run, kind: str, text: str) -> None:
        """Report a message on rank 0, once for each kind."""
        if kind not in self._warned and run.world.rank == 0:
            self._reporter.report(Notice(text=text))
        self._warned.add(kind)


def past_critical_batch(run: Run, noise: float) -> str:
    """Return the warning for a global batch that exceeds the noise scale, in samples."""
    batch = run.global_batch_size
    return (
        f"the global batch of {batch} is larger than the critical batch size of about {noise:.0f} (gradient "
        f"noise scale): an even larger batch would need at most {remaining_speedup(noise, batch):.2f} times "
        "fewer steps"
    )
