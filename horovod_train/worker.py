"""Worker process of one rank.

load the job -> initialize Horovod -> check the ranks -> create the replica -> resume -> train -> report
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from time import monotonic, strftime

from horovod_train.collectives.base import Collective, Communicator, Mesh, broadcast_json
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.arguments import axes_of, for_ranks
from horovod_train.config.load import load_job
from horovod_train.config.schema import Job
from horovod_train.data.shard import WAITING
from horovod_train.errors import HorovodTrainError, PeerError, PreemptedError, UserError
from horovod_train.events.file import channel_of
from horovod_train.events.types import Event, Failure, Notice
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import Framework, HasDevice, explained_by
from horovod_train.health.comparisons import check_world
from horovod_train.health.watches import (
    DataWatch,
    DeviceWatch,
    Heartbeat,
    JoinWatch,
    PeerWatch,
    heartbeat_dir,
)
from horovod_train.horovod.environment import from_slurm
from horovod_train.horovod.fingerprint import environment_fingerprint
from horovod_train.horovod.mpi import number_of, refuse_other_launchers
from horovod_train.rank import RankServices, check_data, make_run, restore_from, resume
from horovod_train.registry import FRAMEWORKS, SCRIPT, make_task_importable
from horovod_train.system import streams
from horovod_train.system.processes import bind, end_children
from horovod_train.telemetry.recorder import (
    record_scaling_baseline,
    watch_device,
)
from horovod_train.training.hooks.saving import PreemptionRequest
from horovod_train.training.loop import LoopBridge, train
from horovod_train.training.run import Run

# The sum of both is below 4 KiB, because launchers may split longer lines of output.
MAX_TRACEBACK_CHARS = 1800
MAX_MESSAGE_CHARS = 1000
MAX_CLOSE_S = 10.0
"""Maximum time to close communication after a failure."""
Callbacks = tuple[Callable[[str], None], Callable[[HorovodTrainError], None]]
"""Functions of watchdogs: print a warning, and end this rank with an error."""


@dataclass(frozen=True)
class WorkerOptions:
    """Command-line options of a worker.

    Attributes:
        job_file: The job description, resolved or not.
        run_id: Name of this run; None: rank 0 derives one from the current time.
        as_events: Write events for ``horovod-train run`` instead of text.
    """

    job_file: Path
    run_id: str | None = None
    as_events: bool = False


def main(options: WorkerOptions) -> int:
    """Run this rank, report a failure, and return the exit code."""
    if options.as_events:
        streams.leave_terminal_of_mpirun()
    streams.install_dropping_streams()
    os.environ.update(from_slurm(os.environ))
    rank_hint = number_of(os.environ, "rank", alone=0)
    channel = channel_of(os.environ) if options.as_events else None
    reporter = Reporter(rank_hint, as_json=options.as_events, channel=channel)
    request = PreemptionRequest()
    request.listen()
    _log_to(reporter)
    folder = heartbeat_dir(os.environ)
    heartbeat = None if folder is None else Heartbeat(folder, rank_hint)
    try:
        refuse_other_launchers(os.environ)
        # `horovod-train run` has already applied overrides from environment variables.
        job = load_job(options.job_file, environ={} if options.as_events else None)
        make_task_importable(job.task)
        bind(job.launch.cpu_binding)
        with ExitStack() as stack:
            if job.framework == SCRIPT:
                from horovod_train.scripts.run import run_script

                run_script(job, options.run_id, reporter, stack)
            else:
                run_rank(job, options, request, reporter, stack, heartbeat)
    except BaseException as error:  # noqa: BLE001  (a task may raise any exception; it is reported here)
        return _report_end(error, reporter)
    finally:
        end_children()
        if lost_bytes := streams.num_dropped_bytes():
            reporter.report(Notice(text=f"the last {lost_bytes:,} bytes of this rank's output are lost"))
    return 0


def run_rank(
    job: Job,
    options: WorkerOptions,
    request: PreemptionRequest,
    reporter: Reporter,
    stack: ExitStack,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Initialize communication, train, and report the result. ``stack`` closes all services.

    Raises:
        PreemptedError: The job was preempted, and has saved a checkpoint.
        HorovodTrainError: A failure with a known cause.
        Exception: Any exception of the user's task.
    """
    # Suppress TensorFlow's log of its compiler flags in each process.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    framework: Framework = FRAMEWORKS.load(job.framework)()
    warn, end = watchdog_callbacks(reporter)
    with JoinWatch(job.health, warn, end):
        world = framework.connect(job)
    stack.enter_context(CloseAfterFailure(world, reporter))
    reporter.rank = world.rank
    environment = environment_fingerprint(job.task if ":" in job.task else None)
    check_world(job, world, environment)
    if world.size > 1 and heartbeat_dir(os.environ) is None:
        stack.callback(PeerWatch(world, job.health, warn, end).close)
    run_id = broadcast_json(world, options.run_id or strftime("%Y%m%d-%H%M%S"))
    services = RankServices(job, world, run_id, reporter, stack)
    if world.rank == 0 and not options.as_events:
        services.write_events()
    manager = services.open_checkpoints(environment, job)
    services.serve_metrics()
    record_scaling_baseline(job, world, services.recorder)

    stack.enter_context(explained_by(framework, job, world.rank))
    mesh = Mesh.of(world, axes_of(job.strategy, world.size))
    job = for_ranks(job, mesh.data.size)
    run = make_run(job, mesh, *framework.prepare(job, mesh))
    if isinstance(framework, HasDevice):
        watch_device(job, services.recorder, framework.gpu_uuid(), framework.device_memory)
    watch_this_rank(run, framework, services, heartbeat)
    check_data(run)
    run.replica.broadcast()
    # Random numbers from here on (dropout) differ between ranks, but not within a model-parallel group.
    framework.seed(job.train.seed, mesh.data.rank + 1, 0)
    resume(run, manager, framework, reporter)
    run.restore = lambda step: restore_from(run, manager.at(step, discards_later=True), framework)

    run.hooks += services.hooks(
        framework=framework, manager=manager, is_preempted=lambda: request.is_received,
        report_interval_s=0.2 if options.as_events else 5.0,
    )  # fmt: skip
    if world.rank == 0:
        services.report_started(run)
    before, started_s = run.progress.epochs_passed, monotonic()
    train_all(framework, run)
    manager.close()
    if world.rank == 0:
        report_end(run, services, before, monotonic() - started_s, manager.directory)


def report_end(run: Run, services: RankServices, before: float, seconds: float, checkpoints: Path) -> None:
    """Report the result of training, which began after ``before`` epochs."""
    num_samples = (run.progress.epochs_passed - before) * run.progress.order.num_samples
    services.report_summary(run, seconds, num_samples, str(checkpoints / f"step-{run.progress.step:012d}"))


class CloseAfterFailure:
    """Context manager that closes communication. A failure is reported before that, and the time is limited.

    If an operation of the engine fails on one rank only (such as for lack of memory), the others wait in it,
    and so does the engine of this rank when it is closed. If this rank ends, so do the others.
    """

    def __init__(self, world: Communicator, reporter: Reporter) -> None:
        self._world, self._reporter = world, reporter

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, PreemptedError):
            self._world.close()
            return
        timer = Timer(MAX_CLOSE_S, _leave, [_report_end(error, self._reporter)])
        timer.daemon = True
        timer.start()
        try:
            self._world.close()
        finally:
            timer.cancel()


def _leave(exit_code: int) -> None:
    end_children()
    os._exit(exit_code)


def watch_this_rank(
    run: Run, framework: Framework, services: RankServices, heartbeat: Heartbeat | None
) -> None:
    """Start watchdogs for a hung GPU and a data stall; let errors and heartbeat say what this rank does."""
    job, world, stack = run.job, run.world, services.stack
    warn, end = watchdog_callbacks(services.reporter)
    services.reporter.step = lambda: run.progress.step
    if heartbeat is not None:
        heartbeat.step, heartbeat.describe = lambda: run.progress.step, lambda: what_it_does(world)
        heartbeat.waiting_since_s = lambda: world.waiting_since_s
    if isinstance(framework, HasDevice) and world.size > 1 and framework.gpu_uuid():
        stack.callback(DeviceWatch(world, job.health, warn, end).close)
    stack.callback(DataWatch(world, job.health, lambda: WAITING.since_s, what_is_awaited, warn, end).close)


def what_it_does(world: Communicator) -> dict[str, object]:
    """Return for what this rank waits, and its last collectives, for a report about a hang."""
    now_s = monotonic()
    found: dict[str, object] = {}
    entry, since_s = world.waiting_in, world.waiting_since_s
    if entry is not None and since_s is not None:
        key = "collective" if entry.is_collective else "device"
        name = entry.name if isinstance(entry, Collective) else str(entry)
        found |= {key: name, f"{key}_s": now_s - since_s}
    if (since_s := WAITING.since_s) is not None:
        found |= {"data": WAITING.what(), "data_s": now_s - since_s}
    if isinstance(world, HorovodCommunicator):
        with suppress(RuntimeError):  # another thread has added one
            last = world.log.entries()[-8:]
            found["last"] = [[str(each), now_s - each.begun_s, each.ended_s] for each in last]
    return found


def what_is_awaited() -> str:
    """Return the file for which this rank waits; empty: unknown."""
    return WAITING.what()


def watchdog_callbacks(reporter: Reporter) -> Callbacks:
    """Return two callbacks for watchdog threads: print a warning, and end this rank with an error."""

    def end(error: HorovodTrainError) -> None:
        _report_failure(error, reporter)
        os._exit(error.exit_code)

    def warn(text: str) -> None:
        reporter.report(Notice(text=text, is_stall=True))

    return warn, end


def train_all(framework: Framework, run: Run) -> None:
    """Train to the end of the job, with the framework's loop if it has one, else with ``loop.train``."""
    if hasattr(framework, "fit"):
        framework.fit(LoopBridge(run))
    else:
        train(run)


class InterruptedByUserError(HorovodTrainError):
    """This rank received SIGINT; exit code 130, as in a shell."""

    exit_code = 130


def _report_end(error: BaseException, reporter: Reporter) -> int:
    """Report the exception that ends this rank, once, unless it was preempted; return its exit code."""
    if isinstance(error, PreemptedError):
        return error.exit_code
    if reporter.exit_code is None:
        if isinstance(error, SystemExit):
            error = _explained_exit(error)
        elif isinstance(error, KeyboardInterrupt):
            error = InterruptedByUserError("interrupted by SIGINT")
        reporter.exit_code = _report_failure(error, reporter)
    return reporter.exit_code


def _explained_exit(left: SystemExit) -> UserError:
    """Return the error for a task that calls ``sys.exit``, because other ranks would wait for this rank."""
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
            host=os.environ.get("HOROVOD_TRAIN_HOST", socket.gethostname()),  # as the job names it
            message=message,
            traceback=text[-MAX_TRACEBACK_CHARS:],
            is_cause=not isinstance(error, PeerError),
            exit_code=code,
            cause=error.cause if isinstance(error, HorovodTrainError) else "task",
            step=None if reporter.step is None else reporter.step(),
        )
    )
    if text and not reporter.as_json:
        sys.stderr.write(text)
    return code


class _ReporterHandler(logging.Handler):
    """Reports warnings of the package's loggers as their events (``extra={"event": ...}``), or as notices."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.WARNING)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        self._reporter.report(event if isinstance(event, Event) else Notice(text=record.getMessage()))


def _log_to(reporter: Reporter) -> None:
    logger = logging.getLogger("horovod_train")
    logger.addHandler(_ReporterHandler(reporter))
    logger.propagate = False
