"""Base class of hooks, the objects from which hooks are created, and the exchange between ranks.

    Hook, HookParts      base class of hooks, and the objects from which the hooks of a run are created
    PeriodicExchange     exchange of the hooks' data between ranks
    ScheduleArguments    arguments of the optimizer that follow schedules (``optimizer.schedules``)
    record_step, save_checkpoint, resume_from
                         functions for jobs and users' own loops: record a step, save, resume

Every rank must call ``save_checkpoint`` and ``resume_from``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import monotonic, time
from typing import Protocol

from horovod_train.checkpoint.arrays import ArrayBlob, dump_state, parse_state
from horovod_train.checkpoint.manager import CheckpointManager, LoadedCheckpoint, document_changes
from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.config.schema import Job
from horovod_train.data.order import DataOrder
from horovod_train.errors import CheckpointError, NumericError, describe_ranks
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import Framework, HasPythonState, Replica, SchedulesArguments
from horovod_train.health.comparisons import check_before_saving
from horovod_train.lr.policy import ArgumentSchedules
from horovod_train.registry import HOOKS, load_attribute
from horovod_train.telemetry.catalog import StepRecord
from horovod_train.telemetry.recorder import Recorder
from horovod_train.training.run import Callbacks, Progress, Run, StepReport


def record_step(recorder: Recorder, report: StepReport) -> None:
    """Record one step as metrics of this rank."""
    outcome = report.outcome
    recorder.record(
        StepRecord(
            seconds=outcome.clock.total_s,
            phase_seconds=dict(outcome.clock.seconds),  # a copy, because it is recorded later
            num_samples=report.share.num_local_samples,
            epochs=report.epochs_passed,
            loss=outcome.loss,
            local_loss=outcome.local_loss,
            lr=report.lr,
            is_finite=outcome.is_finite,
            own_seconds=outcome.clock.own_s,
            step=report.step,
            numbers=report.numbers,
        )
    )


def save_checkpoint(
    manager: CheckpointManager,
    world: Communicator,
    replica: Replica,
    progress: Progress,
    rng: bytes,
    *,
    wait: bool,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Save a replica and its progress. Every rank must call it, between the same two steps.

    Raises:
        NumericError: Weights are not finite.
        DesyncError: Ranks have different states.
        CheckpointError: ``wait`` is True, and the checkpoint could not be written.
    """
    replica.sync_buffers()
    if not replica.is_finite():
        raise NumericError(
            f"step {progress.step}: weights are not finite, and are not saved",
            hint="resume from the last checkpoint with a lower lr.base_lr or health.non_finite: skip",
        )
    holders = None  # None: rank 0 has all arrays
    if world.size > 1:
        holders = check_before_saving(world, replica.state(copy=False), progress.step)
    own = dict(replica.rank_state())
    if isinstance(replica, HasPythonState) and replica.python_state is not None:
        own.update(replica.python_state.take())
    manager.save(
        progress.step,
        take_state=lambda copy: replica.state(copy=copy),
        holders=holders,
        rng=rng,
        own=dump_state(None, own) if own else b"",
        progress=progress.to_json(),
        summary={
            "epochs": progress.epochs_passed,
            "metrics": dict(progress.current_metrics if metrics is None else metrics),
            "unix_time_s": time(),
        },
        wait=wait,
    )


def resume_from(
    world: Communicator,
    resumed: LoadedCheckpoint,
    replica: Replica,
    progress: Progress,
    load_rng: Callable[[object, Mapping[str, ArrayBlob]], None],
    reseed: Callable[[], None],
) -> None:
    """Load a checkpoint: progress, state, and this rank's random generators. Every rank must call it.

    If the number of ranks has changed, generators cannot be loaded, and ``reseed`` is called.

    Raises:
        CheckpointError: The checkpoint does not match the job, or a rank cannot read it. All ranks raise.
        UserError: The checkpoint is within an epoch, and the order of samples has changed.
    """
    progress.restore(resumed.progress)
    problem: CheckpointError | None = None
    try:
        _load(resumed, replica, load_rng)
    except CheckpointError as error:
        problem = error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = CheckpointError(
            f"{resumed.name} does not match the model or the optimizer of this job: "
            f"{type(error).__name__}: {error}",
            hint="train under another name, or set checkpoint.resume: never",
        )
        problem.__cause__ = error
    problems = allgather_json(world, None if problem is None else str(problem))
    if problem is not None:
        raise problem
    failed = [rank for rank, found in enumerate(problems) if found is not None]
    if failed:
        raise CheckpointError(
            f"{describe_ranks(failed)} cannot resume from {resumed.name}: {problems[failed[0]]}"
        )
    if resumed.rng is None:
        reseed()


def _load(
    resumed: LoadedCheckpoint, replica: Replica, load_rng: Callable[[object, Mapping[str, ArrayBlob]], None]
) -> None:
    replica.load_state(resumed.state)
    # Empty data: the rank had no per-rank state.
    of_ranks: Sequence[Mapping[str, ArrayBlob]] = [
        parse_state(data)[1] if data else {} for data in resumed.own
    ]
    if isinstance(replica, HasPythonState) and replica.python_state is not None:
        of_ranks = replica.python_state.load(of_ranks)
    replica.load_rank_states(of_ranks)
    if resumed.rng is not None:
        load_rng(*parse_state(resumed.rng))


def changes_since(resumed: LoadedCheckpoint, order: DataOrder) -> list[str]:
    """Return a line for each change since a checkpoint was written; ``order`` is the present sample order."""
    before = asdict(DataOrder(**resumed.progress["order"]))  # type: ignore[arg-type]
    return [*document_changes(before, asdict(order), "data"), *resumed.changes]


INTERVAL_S = 0.5
# Limit of steps between two exchanges, because steps may become slower.
MAX_STEPS_BETWEEN = 64

_HEAD = struct.Struct("<d")
_LENGTH = struct.Struct("<q")


class Contribution(Protocol):
    """A participant of the exchange. Every rank must register the same participants in the same order."""

    def payload(self) -> bytes:
        """Return the data that this rank sends."""
        ...

    def on_gathered(self, of_ranks: Sequence[bytes]) -> None:
        """Process the data of all ranks, in rank order."""
        ...


class PeriodicExchange:
    """An all-gather after some of the steps, which are the same on all ranks. ``clock`` must be monotonic.

    It takes place about twice a second. A collective takes about a millisecond. Therefore, it is not called
    in each step, and one collective transfers the data of all hooks, such as the preemption flag and step
    times.

    Attributes:
        contributions: The participants, in the same order on all ranks.
        interval_s: Time between the last two exchanges, in seconds.
    """

    def __init__(self, world: Communicator, clock: Callable[[], float] = monotonic) -> None:
        self._world = world
        self._clock = clock
        self._last_s = clock()
        self._num_steps = 0
        self._next_after = 1
        self.contributions: list[Contribution] = []
        self.interval_s = 0.0

    def after_step(self) -> bool:
        """Count a step; return whether there was an exchange. Every rank must call it after each step.

        Raises:
            PeerError: Another rank was lost.
        """
        self._num_steps += 1
        if self._world.size == 1:
            if self._clock() - self._last_s < INTERVAL_S:
                return False
        elif self._num_steps < self._next_after:
            return False
        now = self._clock()
        self.interval_s = now - self._last_s
        messages = self._world.allgather(self._message())
        # These numbers are equal on all ranks, so all ranks have the next exchange after the same step.
        seconds = sum(_HEAD.unpack_from(message)[0] for message in messages)
        step_s = seconds / self._world.size / self._num_steps
        wanted = min(MAX_STEPS_BETWEEN, int(INTERVAL_S / max(step_s, 1e-9)))
        # At most double: some steps are fast because their batches were prefetched, later ones are not.
        self._next_after = max(1, min(wanted, 2 * self._next_after))
        self._num_steps = 0
        self._last_s = now
        self._dispatch(messages)
        return True

    def _message(self) -> bytes:
        payloads = [contribution.payload() for contribution in self.contributions]
        return b"".join([_HEAD.pack(self.interval_s), *(_LENGTH.pack(len(each)) + each for each in payloads)])

    def _dispatch(self, messages: Sequence[bytes]) -> None:
        places = [_HEAD.size] * len(messages)
        for contribution in self.contributions:
            of_ranks = []
            for rank, message in enumerate(messages):
                begin = places[rank] + _LENGTH.size
                places[rank] = begin + _LENGTH.unpack_from(message, places[rank])[0]
                of_ranks.append(message[begin : places[rank]])
            contribution.on_gathered(of_ranks)


@dataclass(frozen=True)
class HookParts:
    """Objects from which the hooks of a run are created.

    Attributes:
        run_id: Name of this run of the job.
        world: Communicator of all ranks.
        framework: The framework; None: a user's own loop.
        manager: Manager of checkpoints; None: a user's own loop.
        recorder: Recorder of this rank's metrics.
        reporter: Writer of this rank's events.
        exchange: Periodic exchange of data between ranks.
        is_preempted: Returns whether this rank was preempted.
        report_interval_s: Time between two reports of progress, in seconds.
        at_end: Callbacks that run when the rank ends, also after an error.
    """

    job: Job
    run_id: str
    world: Communicator
    framework: Framework | None
    manager: CheckpointManager | None
    recorder: Recorder
    reporter: Reporter
    exchange: PeriodicExchange
    is_preempted: Callable[[], bool]
    report_interval_s: float
    at_end: ExitStack


class Hook(Callbacks):
    """Base class of hooks. Subclasses override some of the methods of callbacks.

    A hook is a class with an entry in ``registry.OBSERVERS`` or ``registry.HOOKS``, which determine the
    order of hooks. Hooks run on all ranks, unless ``of`` returns None.
    """

    @classmethod
    def of(cls, parts: HookParts) -> Hook | None:  # noqa: ARG003
        """Return the hook of a run; None: the job, or this rank, does not require it."""
        return cls()


def make_hooks(parts: HookParts, locations: Sequence[str] = HOOKS) -> list[Hook]:
    """Return the hooks of a run, in the order of ``locations``, the import paths of their classes."""
    made = (load_attribute(location, what="hook").of(parts) for location in locations)
    return [hook for hook in made if hook is not None]


class ScheduleArguments(Hook):
    """Sets arguments of the optimizer before each step.

    The arguments follow the schedules in ``optimizer.schedules``.
    """

    _schedules: ArgumentSchedules

    @classmethod
    def of(cls, parts: HookParts) -> ScheduleArguments | None:
        """Return the hook; None: the job has no such schedules."""
        return cls() if parts.job.optimizer.schedules else None

    def on_start(self, run: Run) -> None:
        schedules = run.job.optimizer.schedules
        self._schedules = ArgumentSchedules(schedules, run.policy.total_epochs, run.in_epochs)
        self.on_step(run)

    def on_step(self, run: Run) -> None:
        assert isinstance(run.replica, SchedulesArguments)  # the rules refuse other frameworks
        run.replica.set_arguments(self._schedules.at(run.schedule_epochs))
