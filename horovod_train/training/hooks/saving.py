"""Hooks that save, evaluate and end the job.

    SaveCheckpoints         periodic checkpoints of the job, and one at the end of training
    EvaluateWithinEpoch     evaluations within an epoch
    StopWhenPreempted       preemption without loss of work
    PreemptionAgreement     after a signal to any rank, all ranks stop after the same step

The loop itself evaluates at the end of an epoch.
"""

from __future__ import annotations

import atexit
import math
import signal
from collections.abc import Callable, Sequence
from time import monotonic
from types import FrameType

from horovod_train.checkpoint.arrays import dump_state
from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Communicator
from horovod_train.events.types import Notice, Preempted
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import Framework
from horovod_train.system.processes import PREEMPTION_SIGNALS
from horovod_train.telemetry.catalog import GraceRecord
from horovod_train.telemetry.recorder import Recorder
from horovod_train.training import loop
from horovod_train.training.hooks.base import Hook, HookParts, PeriodicExchange, save_checkpoint
from horovod_train.training.run import ExitPreempted, Run, StepReport


class SaveCheckpoints(Hook):
    """Saves checkpoints at the job's intervals, after the best evaluation so far, and at the end."""

    def __init__(self, manager: CheckpointManager, framework: Framework) -> None:
        self._manager = manager
        self._framework = framework
        self._passed: list[int] = []
        self._best: float | None = None  # of this start
        self._is_best = False

    @classmethod
    def of(cls, parts: HookParts) -> SaveCheckpoints:
        assert parts.manager is not None
        assert parts.framework is not None
        return cls(parts.manager, parts.framework)

    def on_start(self, run: Run) -> None:
        """Count intervals from the start of the training."""
        self._passed = self._passed_now(run)

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """Compare the metric of ``checkpoint.best``; after a start, the first evaluation is the best one."""
        rule = run.job.checkpoint.best
        if begins or rule is None:
            return
        value = run.progress.metrics.get(rule.metric, math.nan) * (1 if rule.mode == "max" else -1)
        if math.isfinite(value) and (self._best is None or value > self._best):
            self._best, self._is_best = value, True

    def on_step(self, run: Run) -> None:
        """Save after steps within an epoch, as soon as replicas are identical."""
        if self._is_due(run) and not run.is_epoch_complete and run.replica.replicas_identical:
            self._save(run)

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        """Save after an evaluation at the end of an epoch; ``on_end`` saves after the last one."""
        if self._is_due(run) and not run.is_done:
            self._save(run)

    def _is_due(self, run: Run) -> bool:
        now = self._passed_now(run)
        if any(new < old for new, old in zip(now, self._passed, strict=True)):
            self._passed, self._best = now, None  # a checkpoint was restored
        return self._is_best or now != self._passed

    def _passed_now(self, run: Run) -> list[int]:
        return [run.progress.num_passed(interval) for interval in run.job.checkpoint.every]

    def _save(self, run: Run) -> None:
        self._passed, self._is_best = self._passed_now(run), False
        save(run, self._manager, self._framework)

    def on_end(self, run: Run) -> None:
        """Save the final checkpoint, and wait until it is on disk."""
        save(run, self._manager, self._framework, wait=True)


def save(run: Run, manager: CheckpointManager, framework: Framework, *, wait: bool = False) -> None:
    """Check the results of all steps, and save a checkpoint; with ``wait``, it is on disk at return."""
    run.deliver_all()
    rng = dump_state(*framework.rng_state())
    save_checkpoint(manager, run.world, run.replica, run.progress, rng, wait=wait)


class EvaluateWithinEpoch(Hook):
    """Evaluates when ``evaluation.every`` has passed, as soon as replicas are identical."""

    def on_step(self, run: Run) -> None:
        """Evaluate, and apply early stopping and the plateau of the learning rate."""
        if run.is_evaluation_due and not run.is_epoch_complete and run.replica.replicas_identical:
            run.deliver_all()
            loop.evaluate_and_follow(run)


class PreemptionRequest:
    """Flag of this process's preemption; signals set it after ``listen`` was called, with no other effect."""

    def __init__(self) -> None:
        self.is_received = False

    def listen(self) -> None:
        """Handle SIGTERM and SIGUSR1 as preemption requests. Must be called in the main thread."""
        for number in PREEMPTION_SIGNALS:
            signal.signal(number, self._on_signal)
        atexit.register(self._ignore)

    def _ignore(self) -> None:
        """Ignore signals from now on: at exit, Python restores default handlers, which kill the process."""
        for number in PREEMPTION_SIGNALS:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.is_received = True


class PreemptionAgreement:
    """Agreement of all ranks to exit after the same step, once ``is_preempted`` returns True on any rank.

    signal on one rank -> flag -> exchanged at a step boundary -> all ranks save -> all exit with code 75

    The flag is part of the periodic exchange between ranks, about twice a second (``PeriodicExchange``).

    ``exchange`` is the periodic exchange between ranks; None: a new one with ``clock``.
    """

    def __init__(
        self,
        world: Communicator,
        is_preempted: Callable[[], bool],
        exchange: PeriodicExchange | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._world = world
        self._is_preempted = is_preempted
        self._exchange = exchange or PeriodicExchange(world, clock)
        self._exchange.contributions.append(self)
        self._is_reached = False

    @property
    def interval_s(self) -> float:
        """Time between the last two exchanges, in seconds: the delay of a preemption request."""
        return self._exchange.interval_s if self._world.size > 1 else 0.0

    @property
    def is_reached(self) -> bool:
        """Whether all ranks exit now; equal on all ranks between two exchanges."""
        return self._is_reached or (self._world.size == 1 and self._is_preempted())

    def reached(self) -> bool:
        """Return whether all ranks exit now, after an exchange if it is due. Must be called after each step.

        Raises:
            PeerError: Another rank was lost.
        """
        self._exchange.after_step()
        return self.is_reached

    def payload(self) -> bytes:
        """Return this rank's flag."""
        return bytes([self._is_preempted()])

    def on_gathered(self, of_ranks: Sequence[bytes]) -> None:
        """Record whether any rank was preempted."""
        self._is_reached = any(flag == b"\1" for flag in of_ranks)


class StopWhenPreempted(Hook):
    """Saves and ends training when any rank was preempted; warns if the grace period is too short."""

    def __init__(
        self,
        agreement: PreemptionAgreement,
        manager: CheckpointManager,
        framework: Framework,
        recorder: Recorder,
        reporter: Reporter,
    ) -> None:
        self._agreement = agreement
        self._manager = manager
        self._framework = framework
        self._recorder = recorder
        self._reporter = reporter
        self._is_warned = False
        self._is_leaving = False
        self._since_identical_s = 0.0

    @classmethod
    def of(cls, parts: HookParts) -> StopWhenPreempted:
        assert parts.manager is not None
        assert parts.framework is not None
        agreement = PreemptionAgreement(parts.world, parts.is_preempted, parts.exchange)
        return cls(agreement, parts.manager, parts.framework, parts.recorder, parts.reporter)

    def on_result(self, run: Run, report: StepReport) -> None:
        """Add up the time of steps since replicas were last identical."""
        self._since_identical_s += report.outcome.clock.total_s

    def on_step(self, run: Run) -> ExitPreempted | None:
        """Save and exit if the ranks have agreed to, as soon as replicas are identical."""
        self._is_leaving = self._is_leaving or self._agreement.reached()
        if not run.replica.replicas_identical:
            return None
        if self._is_leaving:
            save(run, self._manager, self._framework, wait=True)
            # Before the first rank exits: some launchers then kill the other ranks.
            self._reporter.report(Preempted(step=run.progress.step, epoch=run.progress.epochs_passed))
            return ExitPreempted(run.progress.step)
        write_s = self._manager.last_write_s
        if write_s is not None and run.world.rank == 0:
            stop_s = max(self._since_identical_s, self._agreement.interval_s)
            self._watch_grace(stop_s + write_s, run.job.launch.grace_s)
        self._since_identical_s = 0.0
        return None

    def _watch_grace(self, needed_s: float, granted_s: float) -> None:
        self._recorder.record(GraceRecord(needed_s, granted_s))
        if needed_s > granted_s and not self._is_warned:
            self._is_warned = True
            text = (
                f"saving and exiting on preemption would take {needed_s:.1f} s, but launch.grace_s is "
                f"{granted_s:g}: raise it, and the grace that Slurm or Kubernetes gives"
            )
            self._reporter.report(Notice(text=text))
