"""What happens around the loop: metrics, checkpoints, checks, progress."""

from __future__ import annotations

from collections import deque
from time import monotonic

from horovod_train.checkpoint.arrays import dump_state
from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.events.types import Evaluation, Notice, Preempted, Progress
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import Framework
from horovod_train.health.desync import check_replicas_identical
from horovod_train.health.preemption import PreemptionAgreement
from horovod_train.telemetry.catalog import EvaluationRecord, GraceRecord
from horovod_train.telemetry.recorder import Recorder
from horovod_train.training.actions import Action, Leave
from horovod_train.training.parts import record_step, save_checkpoint
from horovod_train.training.readings import StepReport
from horovod_train.training.run import Run


class Hook:
    """Does nothing; others override what they need."""

    def on_start(self, run: Run) -> None:
        """Training begins."""

    def on_reading(self, run: Run, report: StepReport) -> Action | None:
        """It is known what a step did."""
        return None

    def on_step(self, run: Run) -> Action | None:
        """An optimizer step was made."""
        return None

    def on_epoch(self, run: Run, *, evaluated: bool) -> Action | None:
        """An epoch is complete."""
        return None

    def on_end(self, run: Run) -> None:
        """Training is complete."""


class RecordMetrics(Hook):
    """Keeps the rank's Prometheus metrics."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_reading(self, run: Run, report: StepReport) -> None:
        """Record the step."""
        record_step(self._recorder, report.share, report.outcome, report.lr, report.epochs_passed)

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        """Record the evaluation."""
        if evaluated:
            self._recorder.record(EvaluationRecord(run.progress.metrics))


class CheckReplicasIdentical(Hook):
    """Compares the whole state between ranks at start, resume, end, and every so many steps."""

    def __init__(self) -> None:
        self._is_due = False

    def on_start(self, run: Run) -> None:
        """Compare before the first step."""
        self._check(run, "before the first step")

    def on_step(self, run: Run) -> None:
        """Compare when it is due, as soon as replicas should be identical."""
        every = run.job.health.sync_check_every_steps
        self._is_due = self._is_due or bool(every and run.progress.step % every == 0)
        if self._is_due and run.replica.replicas_identical:
            self._is_due = False
            self._check(run, f"after step {run.progress.step}")

    def on_end(self, run: Run) -> None:
        """Compare what will be kept."""
        self._check(run, "at the end")

    def _check(self, run: Run, when: str) -> None:
        if run.world.size > 1:
            run.replica.sync_buffers()
            check_replicas_identical(run.world, run.replica.state(copy=False), when)


class SaveCheckpoints(Hook):
    """Saves when the job says so, and at the end."""

    def __init__(self, manager: CheckpointManager, framework: Framework) -> None:
        self._manager = manager
        self._framework = framework
        self._is_due = False

    @property
    def last_write_s(self) -> float | None:
        """Time the last checkpoint took to write, in seconds; None: there is none yet."""
        return self._manager.last_write_s

    def on_step(self, run: Run) -> None:
        """Save when steps say so, as soon as rank 0's replica is everyone's."""
        every = run.job.checkpoint.every_steps
        self._is_due = self._is_due or bool(every and run.progress.step % every == 0)
        if self._is_due and run.replica.replicas_identical:
            self._is_due = False
            self.save(run)

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        """Save when epochs say so."""
        every = run.job.checkpoint.every_epochs
        if every and run.progress.epoch % every == 0 and not run.is_done:
            self.save(run)

    def on_end(self, run: Run) -> None:
        """Save the result."""
        self.save(run, wait=True)

    def save(self, run: Run, *, wait: bool = False) -> None:
        """Save now; with ``wait`` it is on disk afterwards. All steps have turned out to be usable."""
        run.tell_all()
        rng = dump_state(*self._framework.rng_state())
        save_checkpoint(self._manager, run.world, run.replica, run.progress, rng, wait=wait)


class StopWhenPreempted(Hook):
    """Saves and ends training when any rank was asked to leave; watches how long that would take."""

    def __init__(
        self,
        agreement: PreemptionAgreement,
        checkpoints: SaveCheckpoints,
        recorder: Recorder,
        reporter: Reporter,
    ) -> None:
        self._agreement = agreement
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._reporter = reporter
        self._is_warned = False
        self._is_leaving = False
        self._since_identical_s = 0.0

    def on_reading(self, run: Run, report: StepReport) -> None:
        """Count how long ranks compute until their replicas are identical."""
        self._since_identical_s += sum(report.outcome.clock.seconds.values())

    def on_step(self, run: Run) -> Leave | None:
        """Leave if the ranks agree to, as soon as their replicas are identical and saved."""
        self._is_leaving = self._is_leaving or self._agreement.reached()
        if not run.replica.replicas_identical:
            return None
        if self._is_leaving:
            self._checkpoints.save(run, wait=True)
            # Before the first rank is gone: some launchers kill the others as soon as one has left.
            self._reporter.report(Preempted(step=run.progress.step, epoch=run.progress.epochs_passed))
            return Leave(run.progress.step)
        write_s = self._checkpoints.last_write_s
        if write_s is not None and run.world.rank == 0:
            stop_s = max(self._since_identical_s, self._agreement.interval_s)
            self._watch_grace(stop_s + write_s, run.job.launch.grace_s)
        self._since_identical_s = 0.0
        return None

    def _watch_grace(self, needed_s: float, granted_s: float) -> None:
        self._recorder.record(GraceRecord(needed_s))
        if needed_s > granted_s and not self._is_warned:
            self._is_warned = True
            text = (
                f"leaving without losing work would take {needed_s:.1f} s, but launch.grace_s is "
                f"{granted_s:g}: raise it, and the grace that Slurm or Kubernetes gives"
            )
            self._reporter.report(Notice(text=text))


class ReportProgress(Hook):
    """Tells a person how far it is; on rank 0 only."""

    WINDOW_S = 10.0

    def __init__(self, reporter: Reporter, interval_s: float) -> None:
        self._reporter = reporter
        self._interval_s = interval_s
        self._next = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._samples = 0
        self._num_steps = 0

    def on_start(self, run: Run) -> None:
        """Begin to count."""
        self._num_steps = run.planned_steps()
        self._recent.append((monotonic(), 0))

    def on_reading(self, run: Run, report: StepReport) -> None:
        """Report when the interval has passed."""
        self._samples += report.share.num_samples
        now = monotonic()
        if now < self._next or run.world.rank != 0:
            return
        self._next = now + self._interval_s
        self._recent.append((now, self._samples))
        while len(self._recent) > 2 and now - self._recent[0][0] > self.WINDOW_S:
            self._recent.popleft()
        since, before = self._recent[0]
        samples_per_s = (self._samples - before) / max(1e-9, now - since)
        samples_left = (self._num_steps - report.step) * run.global_batch_size
        self._reporter.report(
            Progress(
                step=report.step,
                num_steps=self._num_steps,
                epoch=min(int(report.epochs_passed), run.job.train.epochs - 1),
                num_epochs=run.job.train.epochs,
                loss=report.outcome.loss,
                lr=report.lr,
                samples_per_s=samples_per_s,
                eta_s=samples_left / samples_per_s,
            )
        )

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        """Report the evaluation."""
        if evaluated and run.world.rank == 0:
            metrics = run.progress.metrics
            self._reporter.report(Evaluation(epoch=run.progress.epoch, metrics=metrics))
            if run.progress.stopped_early:
                rule = run.job.evaluation.early_stopping
                assert rule is not None
                text = f"stopping early: {rule.metric} did not improve in {rule.patience} evaluations"
                self._reporter.report(Notice(text=text))
