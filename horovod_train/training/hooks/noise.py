"""Gradient noise scale: averages the moments of measured steps, and reports the critical batch size."""

from __future__ import annotations

from horovod_train.config.support import follows_gain
from horovod_train.errors import UserError
from horovod_train.events.types import Notice
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import MeasuresNoise
from horovod_train.telemetry.recorder import Recorder
from horovod_train.telemetry.records import GroupNoiseRecord
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.noise import MAX_DECAY, remaining_speedup, step_moments
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.run import Run

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
        """Determine whether the next step is measured."""
        if isinstance(run.replica, MeasuresNoise) and run.replica.noise is not None:
            run.replica.noise.is_due = run.progress.step % self._every_steps == 0

    def on_reading(self, run: Run, report: StepReport) -> None:
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
