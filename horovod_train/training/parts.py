"""Functions for jobs and users' own loops: record a step, save, resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from time import time

from horovod_train.checkpoint.arrays import ArrayBlob, dump_state, parse_state
from horovod_train.checkpoint.changes import document_changes
from horovod_train.checkpoint.manager import CheckpointManager, Resumed
from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.errors import CheckpointError, NumericError, describe_ranks
from horovod_train.frameworks.base import HasPythonState, Replica
from horovod_train.health.desync import check_before_saving
from horovod_train.telemetry.recorder import Recorder
from horovod_train.telemetry.records import StepRecord
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.progress import DataOrder, Progress


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
    resumed: Resumed,
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
    resumed: Resumed, replica: Replica, load_rng: Callable[[object, Mapping[str, ArrayBlob]], None]
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


def changes_since(resumed: Resumed, order: DataOrder) -> list[str]:
    """Return a line for each change since a checkpoint was written; ``order`` is the present sample order."""
    return [*document_changes(resumed.progress["order"], asdict(order), "data"), *resumed.changes]
