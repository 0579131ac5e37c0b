"""Preemption without loss of work: after a signal to any rank, all ranks stop after the same step.

    signal on one rank -> flag -> exchanged at a step boundary -> all ranks save -> all exit with code 75

The flag is part of the periodic exchange between ranks, about twice a second (``training/exchange.py``).
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Sequence
from time import monotonic
from types import FrameType

from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Communicator
from horovod_train.events.types import Notice, Preempted
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import Framework
from horovod_train.system.signals import PREEMPTION_SIGNALS
from horovod_train.telemetry.recorder import Recorder
from horovod_train.telemetry.records import GraceRecord
from horovod_train.training.actions import ExitPreempted
from horovod_train.training.exchange import PeriodicExchange
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.hooks.checkpoints import save
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.run import Run


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
        """Return the hook."""
        assert parts.manager is not None
        assert parts.framework is not None
        agreement = PreemptionAgreement(parts.world, parts.is_preempted, parts.exchange)
        return cls(agreement, parts.manager, parts.framework, parts.recorder, parts.reporter)

    def on_reading(self, run: Run, report: StepReport) -> None:
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
