"""One rank, from a resolved job to an exit code: the one file that knows the whole process side.

read the job -> join the world -> check it -> make the replica -> resume -> train -> summary
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, strftime

from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.checkpoint.manager import Resumed as CheckpointContent
from horovod_train.checkpoint.write_report import WriteReport
from horovod_train.collectives.base import Communicator, allgather_json, broadcast_json
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.load import load_job
from horovod_train.config.schema import Job
from horovod_train.config.strategies import axes_of, batch_size_of_lr
from horovod_train.data.waiting import WAITING
from horovod_train.errors import HorovodTrainError, PeerError, PreemptedError, UserError
from horovod_train.events.channel import channel_of
from horovod_train.events.file import EVENTS_FILE, EventsFile, opened
from horovod_train.events.types import (
    CheckpointWritten,
    Failure,
    Notice,
    Resumed,
    Started,
    Summary,
    Target,
    Targets,
)
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import Framework, HasDevice, Reader, Replica, explained_by
from horovod_train.health.data_watch import DataWatch
from horovod_train.health.device_watch import DeviceWatch
from horovod_train.health.finite import FiniteGuard
from horovod_train.health.heartbeat import JoinWatch, PeerWatch, heartbeat_dir, start_heartbeat
from horovod_train.health.world_check import check_world
from horovod_train.horovod.environment import from_slurm
from horovod_train.horovod.fingerprint import environment_fingerprint
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.registry import FRAMEWORKS, SCRIPT, make_task_importable
from horovod_train.system import streams
from horovod_train.system.children import end_children
from horovod_train.system.cpu_affinity import bind
from horovod_train.system.files import make_folder
from horovod_train.telemetry.rank_metrics import (
    open_recorder,
    record_scaling_baseline,
    serve,
    watch_device,
    watch_exchanges,
    watch_waiting,
)
from horovod_train.telemetry.recorder import Recorder
from horovod_train.training.bridge import LoopBridge
from horovod_train.training.exchange import PeriodicExchange
from horovod_train.training.hooks.base import HookParts, make_hooks
from horovod_train.training.hooks.preemption import PreemptionRequest
from horovod_train.training.loop import train
from horovod_train.training.parts import changes_since, resume_from
from horovod_train.training.progress import DataOrder, Progress
from horovod_train.training.run import Run

# Together below 4 KiB: launchers may split longer lines.
MAX_TRACEBACK_CHARS = 1800
MAX_MESSAGE_CHARS = 1000
MAX_CHANGES = 20


@dataclass(frozen=True)
class WorkerOptions:
    """How a worker was started.

    Attributes:
        job_file: The job description, resolved or not.
        run_id: Name of this run; None: rank 0 makes one from the time.
        as_events: Write events for ``horovod-train run`` instead of text.
    """

    job_file: Path
    run_id: str | None = None
    as_events: bool = False


def main(options: WorkerOptions) -> int:
    """Run this rank and return its exit code; never raises.

    The rank on which a failure occurred reports it. A rank that only lost a peer reports that in one line.
    """
    if options.as_events:
        streams.leave_terminal_of_mpirun()
    streams.ignore_unencodable_output()
    os.environ.update(from_slurm(os.environ))
    rank_hint = int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    channel = channel_of(os.environ) if options.as_events else None
    reporter = Reporter(rank_hint, as_json=options.as_events, channel=channel)
    request = PreemptionRequest()
    request.listen()
    _log_to(reporter)
    folder = heartbeat_dir(os.environ)
    if folder is not None:
        start_heartbeat(folder, rank_hint)
    try:
        # `run` has applied the environment's overrides already.
        job = load_job(options.job_file, environ={} if options.as_events else None)
        make_task_importable(job.task)
        bind(job.launch.cpu_binding)
        with ExitStack() as stack:
            if job.framework == SCRIPT:
                from horovod_train.scripts.run import run_script

                run_script(job, options.run_id, reporter, stack)
            else:
                run_rank(job, options, request, reporter, stack)
    except PreemptedError as left:
        return left.exit_code
    except SystemExit as left:
        return _report_failure(_explained_exit(left), reporter)
    except KeyboardInterrupt:
        return _report_failure(InterruptedByUserError("interrupted by SIGINT"), reporter)
    except BaseException as error:  # noqa: BLE001  (a task may raise anything; it is reported here)
        return _report_failure(error, reporter)
    finally:
        end_children()
        if lost_bytes := streams.num_dropped_bytes():
            reporter.report(Notice(text=f"the last {lost_bytes:,} bytes of this rank's output are lost"))
    return 0


def run_rank(
    job: Job, options: WorkerOptions, request: PreemptionRequest, reporter: Reporter, stack: ExitStack
) -> None:
    """Join the world, train, and report the result. The stack closes what was opened.

    Raises:
        PreemptedError: The job was preempted, and has saved a checkpoint.
        HorovodTrainError: A failure that this package explains.
        Exception: Any exception of the user's task.
    """
    # TensorFlow logs its compiler flags in each process.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    framework: Framework = FRAMEWORKS.load(job.framework)()
    warn, end = watchdog_callbacks(reporter)
    with JoinWatch(job.health, warn, end):
        world = framework.connect(job)
    stack.callback(world.close)
    reporter.rank = world.rank
    environment = environment_fingerprint(job.task if ":" in job.task else None)
    check_world(job, world, environment)
    if world.size > 1 and heartbeat_dir(os.environ) is None:
        stack.callback(PeerWatch(world, job.health, warn, end).close)
    run_id = broadcast_json(world, options.run_id or strftime("%Y%m%d-%H%M%S"))
    if world.rank == 0 and not options.as_events:
        keep_events(job, run_id, reporter, stack)
    recorder = open_recorder(job, run_id, world)
    manager = open_checkpoints(job, world, environment, recorder, reporter, stack)
    addresses = serve_metrics(job, world, run_id, recorder, reporter, stack)
    record_scaling_baseline(job, world, recorder)
    watch_exchanges(recorder, world)
    watch_waiting(recorder, world)

    stack.enter_context(explained_by(framework, job, world.rank))
    mesh = Mesh.of(world, axes_of(job.strategy, world.size))
    run = make_run(job, mesh, *framework.prepare(job, mesh))
    if isinstance(framework, HasDevice):
        watch_device(job, recorder, framework.gpu_uuid(), framework.device_memory)
    watch_this_rank(job, framework, world, warn, end, stack)
    run.replica.broadcast()
    # Random numbers from here on (dropout) differ between ranks, but not within a model-parallel group.
    framework.seed(job.train.seed, mesh.data.rank + 1, 0)
    resume(run, manager, framework, reporter)
    run.restore = lambda step: restore_from(run, manager.at(step), framework)

    parts = HookParts(
        job=job, run_id=run_id, world=world, framework=framework, manager=manager, recorder=recorder,
        reporter=reporter, exchange=PeriodicExchange(world), is_preempted=lambda: request.is_received,
        report_interval_s=0.2 if options.as_events else 5.0, at_end=stack,
    )  # fmt: skip
    run.hooks += make_hooks(parts)
    if world.rank == 0:
        report_started(run, reporter)
    before, started = run.progress.epochs_passed, monotonic()
    train_all(framework, run)
    manager.close()
    if world.rank == 0:
        seconds = monotonic() - started
        num_samples = (run.progress.epochs_passed - before) * len(run.train_reader)
        report_summary(run, reporter, addresses, manager, seconds, num_samples / seconds)


def watch_this_rank(
    job: Job,
    framework: Framework,
    world: Communicator,
    warn: Callable[[str], None],
    end: Callable[[HorovodTrainError], None],
    stack: ExitStack,
) -> None:
    """Watch this rank for a hung GPU and for data that does not arrive."""
    if isinstance(framework, HasDevice) and world.size > 1 and framework.gpu_uuid():
        stack.callback(DeviceWatch(world, job.health, warn, end).close)
    stack.callback(DataWatch(world, job.health, lambda: WAITING.since_s, warn, end).close)


def keep_events(job: Job, run_id: str, reporter: Reporter, stack: ExitStack) -> None:
    """Write this rank's events to the run's folder, as `horovod-train run` does for ranks that it starts."""

    def warn(problem: str) -> None:
        reporter.report(Notice(text=problem))

    run_dir = Path(job.run_dir).expanduser() / job.name
    try:
        make_folder(run_dir, job.run_dir_access)
        (run_dir / run_id).mkdir(exist_ok=True)
        events = EventsFile(run_dir / run_id / EVENTS_FILE, warn)
    except OSError as error:
        warn(f"no {EVENTS_FILE}: {error.filename}: {error.strerror}")
        return
    stack.callback(events.close)
    events.write(opened(job.name, run_id), reporter.rank)
    reporter.file = events


Callbacks = tuple[Callable[[str], None], Callable[[HorovodTrainError], None]]


def watchdog_callbacks(reporter: Reporter) -> Callbacks:
    """Return two callbacks for watchdog threads: print a warning, and end this rank with an error."""

    def end(error: HorovodTrainError) -> None:
        _report_failure(error, reporter)
        os._exit(error.exit_code)

    def warn(text: str) -> None:
        reporter.report(Notice(text=text))

    return warn, end


def make_run(job: Job, mesh: Mesh, replica: Replica, train_reader: Reader, eval_reader: Reader | None) -> Run:
    """Put together what the loop needs."""
    return Run(
        job=job,
        mesh=mesh,
        replica=replica,
        train_reader=train_reader,
        eval_reader=eval_reader,
        policy=LearningRatePolicy(job.lr, batch_size_of_lr(job, mesh.data.size), job.train.epochs),
        guard=FiniteGuard(job.health, mesh.world, scaler_skips=job.train.precision == "fp16"),
        progress=Progress(DataOrder(len(train_reader), job.train.seed, job.data.shuffle)),
    )


def train_all(framework: Framework, run: Run) -> None:
    """Train to the end of the job: with the framework's own loop if it has one, else with ours."""
    if hasattr(framework, "fit"):
        framework.fit(LoopBridge(run))
    else:
        train(run)


def serve_metrics(
    job: Job, world: Communicator, run_id: str, recorder: Recorder, reporter: Reporter, stack: ExitStack
) -> list[str]:
    """Serve this rank's metrics; return every rank's address, and tell ``run`` about them."""
    target = serve(job, run_id, world, recorder, stack)
    known = allgather_json(world, None if target is None else target.model_dump(mode="json"))
    targets = [Target.model_validate(each) for each in known if each is not None]
    if world.rank == 0:
        for at in range(0, len(targets), 8):  # lines stay short: launchers cut long ones
            reporter.report(Targets(targets=tuple(targets[at : at + 8])))
    return [target.address for target in targets]


def open_checkpoints(
    job: Job,
    world: Communicator,
    environment: Mapping[str, str],
    recorder: Recorder,
    reporter: Reporter,
    stack: ExitStack,
) -> CheckpointManager:
    """Return the manager of the run's checkpoints."""

    def on_written(report: WriteReport) -> None:
        recorder.record(report)
        reporter.report(CheckpointWritten(path=report.path, seconds=report.seconds, error=report.error))

    run_dir = Path(job.run_dir).expanduser() / job.name
    if world.rank == 0 and job.checkpoint.dir is None:
        with suppress(OSError):  # the manager says what is wrong with it, on all ranks
            make_folder(run_dir, job.run_dir_access)
    directory = Path(job.checkpoint.dir).expanduser() if job.checkpoint.dir else run_dir / "checkpoints"
    manager = CheckpointManager(
        directory.resolve(),
        job.checkpoint,
        world,
        job.model_dump(mode="json"),
        on_written,
        environment,
    )
    stack.callback(manager.close)
    return manager


def resume(run: Run, manager: CheckpointManager, framework: Framework, reporter: Reporter) -> None:
    """Resume from the newest valid checkpoint, if the job says so and there is one."""
    resumed = manager.latest()
    if resumed is None:
        return
    changes = changes_since(resumed, run.progress.order)
    restore_from(run, resumed, framework)
    manager.mark_resumed(resumed.name, changes)
    if run.world.rank == 0:
        progress = run.progress
        reporter.report(
            Resumed(checkpoint=resumed.name, epoch=round(progress.epochs_passed, 3), step=progress.step)
        )
        for change in changes[:MAX_CHANGES]:
            reporter.report(Notice(text=f"changed since {resumed.name}: {change}"))
        if len(changes) > MAX_CHANGES:
            reporter.report(Notice(text=f"and {len(changes) - MAX_CHANGES} other changes"))


def restore_from(run: Run, resumed: CheckpointContent, framework: Framework) -> None:
    """Go on where a checkpoint stands."""
    resume_from(
        run.world,
        resumed,
        run.replica,
        run.progress,
        framework.load_rng_state,
        lambda: framework.seed(run.job.train.seed, run.mesh.data.rank + 1, run.progress.step),
    )


def report_started(run: Run, reporter: Reporter) -> None:
    """Tell what is about to be trained."""
    reporter.report(
        Started(
            job=run.job.name,
            num_parameters=run.replica.num_parameters(),
            world_size=run.world.size,
            global_batch_size=run.global_batch_size,
            precision=run.job.train.precision,
            device=run.replica.device_name(),
        )
    )


def report_summary(
    run: Run,
    reporter: Reporter,
    addresses: list[str],
    manager: CheckpointManager,
    seconds: float,
    samples_per_s: float,
) -> None:
    """Tell how it went."""
    reporter.report(
        Summary(
            job=run.job.name,
            epochs=run.progress.epochs_passed,
            steps=run.progress.step,
            seconds=seconds,
            metrics=run.progress.metrics,
            samples_per_s=samples_per_s,
            world_size=run.world.size,
            global_batch_size=run.global_batch_size,
            lr_scaling=run.job.lr.scaling,
            base_lr=run.job.lr.base_lr,
            reference_batch_size=run.job.lr.reference_batch_size,
            peak_lr=run.policy.peak_lr,
            metrics_addresses=tuple(addresses),
            checkpoint=str(manager.directory / f"step-{run.progress.step:012d}"),
        )
    )


class InterruptedByUserError(HorovodTrainError):
    """This rank received SIGINT; exit code 130, as in a shell."""

    exit_code = 130


def _explained_exit(left: SystemExit) -> UserError:
    """Return the error of a task that calls ``sys.exit``: other ranks would wait for this rank."""
    return UserError(
        f"the task ended this rank with sys.exit({left.code!r}) before training was done",
        hint="return, or raise an exception; to stop all ranks early, use train.max_steps or early_stopping",
    )


def _traceback_from_script(error: BaseException) -> traceback.TracebackException:
    """Return an error's traceback, without the frames that started the user's script."""
    formatted = traceback.TracebackException.from_exception(error)
    starts = [place for place, frame in enumerate(formatted.stack) if frame.filename == "<frozen runpy>"]
    if starts:
        del formatted.stack[: starts[-1] + 1]
    return formatted


def _report_failure(error: BaseException, reporter: Reporter) -> int:
    """Report a failure; return its exit code."""
    expected = isinstance(error, HorovodTrainError)
    text = "" if expected else "".join(_traceback_from_script(error).format())
    message = str(error) if expected else f"{type(error).__name__}: {error}"
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + " ..."
    code = error.exit_code if isinstance(error, HorovodTrainError) else 1
    reporter.report(
        Failure(
            host=socket.gethostname(),
            message=message,
            traceback=text[-MAX_TRACEBACK_CHARS:],
            is_cause=not isinstance(error, PeerError),
            exit_code=code,
            cause=error.cause if isinstance(error, HorovodTrainError) else "task",
        )
    )
    if text and not reporter.as_json:
        sys.stderr.write(text)
    return code


class _ReporterHandler(logging.Handler):
    """Reports warnings of the package's loggers as notices."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.WARNING)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        self._reporter.report(Notice(text=record.getMessage()))


def _log_to(reporter: Reporter) -> None:
    logger = logging.getLogger("horovod_train")
    logger.addHandler(_ReporterHandler(reporter))
    logger.propagate = False
