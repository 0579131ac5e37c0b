"""Execution of a user's script on one rank.

A script is a job with ``framework: script`` and ``task: train.py:__main__``. It calls ``hvd.init()`` itself
and runs unchanged. Libraries that it imports are instrumented (``meter.py``), so that this rank serves
metrics and reports events and heartbeats like a rank of any job.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic, strftime
from types import FrameType, ModuleType

import wrapt

from horovod_train.collectives.base import SingleRank
from horovod_train.config.schema import Job
from horovod_train.config.support import frameworks_with_support
from horovod_train.errors import HorovodTrainError, PeerError, PreemptedError, result_of, translated
from horovod_train.events.types import Preempted, ScriptDone, Targets
from horovod_train.events.wire import Reporter
from horovod_train.horovod.bindings import allreduce_counters, gpu_allreduce_counters
from horovod_train.horovod.environment import horovod_settings
from horovod_train.horovod.mpi import number_of
from horovod_train.registry import load_attribute
from horovod_train.scripts.meter import StepMeter
from horovod_train.telemetry.catalog import SCRIPT_CATALOG, GpuExchangeRecord
from horovod_train.telemetry.recorder import open_recorder, serve, watch_exchange, watch_waiting
from horovod_train.telemetry.tracking import open_trackers

log = logging.getLogger(__name__)

# Settings of Horovod for jobs, whose replicas build buckets themselves. Scripts use Horovod's defaults.
OWN_FUSION = {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"}


class ScriptError(HorovodTrainError):
    """A script has ended with an exit code other than 0."""

    cause = "task"

    def __init__(self, exit_code: int, message: str = "") -> None:
        super().__init__(message or f"the script has ended with exit code {exit_code}")
        self.exit_code = exit_code


def run_script(job: Job, run_id: str | None, reporter: Reporter, stack: ExitStack) -> None:
    """Run a script to its end, and measure it.

    Raises:
        PreemptedError: The script ended with exit code 75, which reports that it has saved its state.
        ScriptError: The script ended with another exit code than 0.
        PeerError: Another rank was lost.
        Exception: Any exception of the script.
    """
    world = _place(os.environ)
    for variable, value in horovod_settings(job).items():
        if variable not in OWN_FUSION:
            os.environ.setdefault(variable, value)
    if job.launch.threads_per_rank is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(job.launch.threads_per_rank))
    run_id = run_id or strftime("%Y%m%d-%H%M%S")
    reporter.rank = world.rank
    recorder = open_recorder(job, run_id, world, SCRIPT_CATALOG)
    watch_exchange(recorder, allreduce_counters)
    watch_exchange(recorder, gpu_allreduce_counters, GpuExchangeRecord)
    target = serve(job, run_id, world, recorder, stack)
    if target is not None:
        reporter.report(Targets(targets=(target,)))
    meter = StepMeter(
        job.name,
        world.rank,
        world.size,
        recorder,
        reporter,
        samples_per_batch=job.task_args.get("batch_size"),
        norm_every_steps=job.metrics.grad_norm_every_steps,
    )
    if job.metrics.enabled:
        watch_imports(meter)
    watch_waiting(recorder, meter)
    trackers = open_trackers(job, run_id, world.size, reporter, recorder, stack) if world.rank == 0 else None
    if trackers is not None:
        reporter.observers.append(trackers.observe_script)
        trackers.start(0)
    begun_s = monotonic()
    try:
        execute(Path(job.task.rpartition(":")[0]), list(map(str, job.task_args.get("arguments", []))))
    except PreemptedError:
        reporter.report(Preempted(step=meter.num_steps, epoch=0.0))
        raise
    finally:
        meter.end()
    reporter.report(ScriptDone(steps=meter.num_steps, seconds=monotonic() - begun_s))


def execute(script: Path, arguments: list[str]) -> None:
    """Run a script as ``python script arguments`` does. Raises as ``run_script`` does."""
    _give_signals_back()
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with translated(peer_error):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        # As in Python: the exit code is the lowest eight bits of a number, and 1 for a text.
        code = left.code & 0xFF if isinstance(left.code, int) else int(left.code is not None)
        if code == PreemptedError.exit_code:
            raise PreemptedError("the script exited with code 75: preempted, state saved") from left
        if code:
            exit_message = left.code if isinstance(left.code, str) else ""
            raise ScriptError(code, exit_message) from left


def peer_error(error: Exception) -> PeerError | None:
    """Return a ``PeerError`` for an exception of Horovod's collectives; None for other exceptions."""
    if type(error).__name__ != "HorovodInternalError":
        return None
    return PeerError(f"a collective failed because another rank exited: {error}")


def _give_signals_back() -> None:
    """Restore the default action of SIGTERM, and convert SIGUSR1, the launcher's stop request, to SIGTERM.

    Scripts that support preemption usually handle SIGTERM.
    """

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, pass_on)


def watch_imports(meter: StepMeter) -> None:
    """Instrument Horovod and frameworks when a script imports them; log a warning if that fails."""

    def instrument(function: str, _: ModuleType) -> None:
        _none, error = result_of(lambda: load_attribute(function, what="instrumentation")(meter))
        if error is not None:
            log.warning("metrics of the script are incomplete: %s: %s", type(error).__name__, error)

    functions = {"horovod.common.basics": "horovod_train.scripts.meter:watch_joining"}
    for _name, support in frameworks_with_support():
        functions.update(support.instrumented)
    for module, function in functions.items():
        wrapt.register_post_import_hook(partial(instrument, function), module)


def _place(environ: Mapping[str, str]) -> SingleRank:
    """Return this rank's place from the launcher's environment variables, without communication."""
    return SingleRank(
        rank=number_of(environ, "rank", alone=0),
        size=number_of(environ, "size", alone=1),
        local_rank=number_of(environ, "local_rank", alone=0),
    )
