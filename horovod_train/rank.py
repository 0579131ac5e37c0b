"""Services of one rank for jobs and for users' own loops: events, metrics, checkpoints, hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from horovod_train.checkpoint.manager import CheckpointManager, LoadedCheckpoint
from horovod_train.checkpoint.writing import WriteReport
from horovod_train.collectives.base import Communicator, Mesh, allgather_json
from horovod_train.config.schema import Job
from horovod_train.data.order import settings_of
from horovod_train.data.shard import MicroBatch
from horovod_train.events.file import EVENTS_FILE, EventsFile, opened
from horovod_train.events.types import CheckpointWritten, Notice, Resumed, Started, Summary, Target, Targets
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import Framework, HasGenerators, HasPythonState, Reader, Replica
from horovod_train.health.comparisons import FiniteGuard, check_same_data, check_same_files
from horovod_train.lr.policy import policy_of
from horovod_train.registry import HOOKS
from horovod_train.system.files import make_folder
from horovod_train.system.machine import versions_with
from horovod_train.telemetry.recorder import Recorder, open_recorder, serve, watch_exchanges, watch_waiting
from horovod_train.training.hooks.base import (
    Hook,
    HookParts,
    PeriodicExchange,
    changes_since,
    make_hooks,
    resume_from,
)
from horovod_train.training.run import Progress, Run

MAX_CHANGES = 20


@dataclass
class RankServices:
    """Services of one rank.

    Attributes:
        world: All ranks.
        run_id: Name of this run of the job.
        stack: Exit stack that closes the services.
        recorder: Metrics of this rank.
        exchange: Exchange between ranks about twice a second.
        addresses: Addresses at which ranks serve metrics.
    """

    job: Job
    world: Communicator
    run_id: str
    reporter: Reporter
    stack: ExitStack
    recorder: Recorder = field(init=False)
    exchange: PeriodicExchange = field(init=False)
    addresses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorder = open_recorder(self.job, self.run_id, self.world)
        self.exchange = PeriodicExchange(self.world)
        watch_exchanges(self.recorder, self.world)
        watch_waiting(self.recorder, self.world)

    def serve_metrics(self) -> str | None:
        """Serve this rank's metrics; return the address. Rank 0 reports all addresses; a collective."""
        target = serve(self.job, self.run_id, self.world, self.recorder, self.stack)
        known = allgather_json(self.world, None if target is None else target.model_dump(mode="json"))
        targets = [Target.model_validate(each) for each in known if each is not None]
        if self.world.rank == 0:
            for at in range(0, len(targets), 8):  # launchers may split long lines
                self.reporter.report(Targets(targets=tuple(targets[at : at + 8])))
        self.addresses = [each.address for each in targets]
        return None if target is None else target.address

    def write_events(self) -> None:
        """Write this rank's events to the run folder, as ``horovod-train run`` does."""

        def warn(problem: str) -> None:
            self.reporter.report(Notice(text=problem))

        run_dir = Path(self.job.run_dir).expanduser() / self.job.name
        try:
            make_folder(run_dir, self.job.run_dir_access)
            (run_dir / self.run_id).mkdir(exist_ok=True)
            events = EventsFile(run_dir / self.run_id / EVENTS_FILE, warn)
        except OSError as error:
            warn(f"no {EVENTS_FILE}: {error.filename}: {error.strerror}")
            return
        self.stack.callback(events.close)
        events.write(opened(self.job.name, self.run_id), self.reporter.rank)
        self.reporter.file = events

    def on_checkpoint_written(self, report: WriteReport) -> None:
        """Record a checkpoint that was written, or that could not be written."""
        self.recorder.record(report)
        self.reporter.report(CheckpointWritten(path=report.path, seconds=report.seconds, error=report.error))

    def open_checkpoints(self, environment: Mapping[str, str], job: Job) -> CheckpointManager:
        """Return the checkpoint manager of a job."""
        run_dir = Path(job.run_dir).expanduser() / job.name
        if self.world.rank == 0 and job.checkpoint.dir is None:
            with suppress(OSError):  # the manager reports the error, on all ranks
                make_folder(run_dir, job.run_dir_access)
        directory = Path(job.checkpoint.dir).expanduser() if job.checkpoint.dir else run_dir / "checkpoints"
        manager = CheckpointManager(
            directory.resolve(),
            job.checkpoint,
            self.world,
            job.model_dump(mode="json"),
            self.on_checkpoint_written,
            environment,
        )
        self.stack.callback(manager.close)
        return manager

    def hooks(
        self,
        locations: Sequence[str] = HOOKS,
        *,
        framework: Framework | None = None,
        manager: CheckpointManager | None = None,
        is_preempted: Callable[[], bool] = lambda: False,
        report_interval_s: float = 5.0,
    ) -> list[Hook]:
        """Return the hooks of a run, in the order of calls.

        Args:
            locations: Import paths of the hooks' classes.
            framework: The framework of the job, for hooks that write checkpoints.
            manager: Checkpoint manager, for hooks that write checkpoints.
            is_preempted: Function that returns whether this rank was preempted.
            report_interval_s: Time between two reports of progress, in seconds.
        """
        parts = HookParts(
            job=self.job, run_id=self.run_id, world=self.world, framework=framework, manager=manager,
            recorder=self.recorder, reporter=self.reporter, exchange=self.exchange, is_preempted=is_preempted,
            report_interval_s=report_interval_s, at_end=self.stack,
        )  # fmt: skip
        return make_hooks(parts, locations)

    def report_started(self, run: Run) -> None:
        """Report the start of training: model, ranks and device."""
        self.reporter.report(
            Started(
                job=run.job.name,
                num_parameters=run.replica.num_parameters(),
                world_size=run.world.size,
                global_batch_size=run.global_batch_size,
                precision=run.job.train.precision,
                device=run.replica.device_name(),
                versions=versions_with(run.job.framework),
            )
        )

    def report_summary(self, run: Run, seconds: float, num_samples: float, checkpoint: str = "") -> None:
        """Report the result of training; ``num_samples``: samples of all ranks in these ``seconds``."""
        self.reporter.report(
            Summary(
                job=run.job.name,
                epochs=run.progress.epochs_passed,
                steps=run.progress.step,
                seconds=seconds,
                metrics=run.progress.metrics,
                samples_per_s=num_samples / seconds,
                world_size=run.world.size,
                global_batch_size=run.global_batch_size,
                lr_scaling=run.job.lr.scaling,
                base_lr=run.job.lr.base_lr,
                reference_batch_size=run.job.lr.reference_batch_size,
                peak_lr=run.policy.peak_lr,
                metrics_addresses=tuple(self.addresses),
                checkpoint=checkpoint,
            )
        )


def make_run(job: Job, mesh: Mesh, replica: Replica, train_reader: Reader, eval_reader: Reader | None) -> Run:
    """Return a new run of a job, at step 0 and without hooks.

    Raises:
        UserError: The learning rate is not valid at this number of ranks.
    """
    policy = policy_of(job, mesh.data.size)
    policy.check()
    order = settings_of(
        train_reader.dataset,
        len(train_reader),
        seed=job.train.seed,
        shuffle=job.data.shuffle,
        samples_per_epoch=job.data.samples_per_epoch,
        row_size=job.global_batch_size(mesh.data.size),
    )
    return Run(
        job=job,
        mesh=mesh,
        replica=replica,
        train_reader=train_reader,
        eval_reader=eval_reader,
        policy=policy,
        guard=FiniteGuard(job.health, mesh.world, scaler_skips=job.train.precision == "fp16"),
        progress=Progress(order),
    )


def check_data(run: Run) -> None:
    """Check that training and evaluation data are the same on all ranks. Collective.

    Raises:
        UserError: They differ.
    """
    if run.world.size == 1:
        return
    state = run.replica.python_state if isinstance(run.replica, HasPythonState) else None
    with nullcontext() if state is None else state.kept():
        for what, reader in (
            ("the training data", run.train_reader),
            ("the evaluation data", run.eval_reader),
        ):
            check_same_files(run.world, what, None if reader is None else reader.dataset)
            check_same_data(
                run.world,
                what,
                0 if reader is None else len(reader),
                partial(_batches_of, reader, run.job.train.batch_size_per_rank),
            )


def _batches_of(reader: Reader | None, batch_size: int, numbers: Sequence[int]) -> object:
    """Return the batch of some samples; several batches if there are more samples than in one of the job."""
    if reader is None or not numbers:
        return None
    starts = range(0, len(numbers), batch_size)
    parts = [MicroBatch(at, min(at + batch_size, len(numbers)), share=0.0) for at in starts]
    batches = list(reader.read(0, np.array(numbers, np.int64), parts))
    return batches[0] if len(batches) == 1 else batches


def resume(
    run: Run, manager: CheckpointManager, framework: HasGenerators, reporter: Reporter
) -> Sequence[str] | None:
    """Resume from the newest valid checkpoint, if the job allows it; every rank must call it.

    Returns:
        Differences between the job of the checkpoint and this job; None: there is no checkpoint.
    """
    resumed = manager.latest()
    if resumed is None:
        return None
    changes = changes_since(resumed, run.progress.order)
    restore_from(run, resumed, framework)
    manager.mark_resumed(resumed.name, changes)
    found = [f"changed since {resumed.name}: {change}" for change in changes]
    if run.world.rank == 0:
        progress = run.progress
        reporter.report(
            Resumed(checkpoint=resumed.name, epoch=round(progress.epochs_passed, 3), step=progress.step)
        )
        for change in found[:MAX_CHANGES]:
            reporter.report(Notice(text=change))
        if len(found) > MAX_CHANGES:
            reporter.report(Notice(text=f"and {len(found) - MAX_CHANGES} other changes"))
    return found


def restore_from(run: Run, resumed: LoadedCheckpoint, framework: HasGenerators) -> None:
    """Restore replica, progress and random state from a checkpoint."""
    resume_from(
        run.world,
        resumed,
        run.replica,
        run.progress,
        framework.load_rng_state,
        lambda: framework.seed(run.job.train.seed, run.mesh.data.rank + 1, run.progress.step),
    )
