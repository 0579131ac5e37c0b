"""Base class of launchers that start ranks on the nodes that a batch system has allocated to this process."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from time import time

import psutil

from horovod_train.errors import LaunchError, PreemptedError
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.hostlist import read_hostfile
from horovod_train.launch.jobs import StateFile
from horovod_train.launch.launchers.batch import BatchLauncher
from horovod_train.launch.launchers.supervised import SupervisedLauncher


class AllocationLauncher(SupervisedLauncher):
    """Base class of launchers that start ranks in an allocation.

    Attributes:
        batch: Launcher that submits jobs to the same batch system.
        hosts_variable: Environment variable with the path of the file that lists a host for each rank.
    """

    uses_this_machine = False
    batch: type[BatchLauncher]
    hosts_variable = ""

    def hosts(self, environ: Mapping[str, str]) -> list[str]:
        """Return the nodes of the allocation as ``host:slots``.

        Raises:
            LaunchError: This process has no allocation.
        """
        if self.batch.id_variable not in environ or self.hosts_variable not in environ:
            raise self.no_allocation()
        return read_hostfile(Path(environ[self.hosts_variable]))

    def time_limit_s(self, native_id: str) -> float:
        """Return the time limit of a job, in seconds since its start.

        Infinity: there is none, or the batch system sends SIGUSR1 before it.

        Raises:
            LaunchError: The batch system does not respond.
        """
        return math.inf

    def run(self, request: LaunchRequest, plan: LaunchPlan, console: JobConsole) -> int:
        """Run the job, and requeue it shortly before its time limit."""
        batch = self.batch()
        native_id = os.environ.get(batch.id_variable, "")
        try:
            with _notified(self._known_limit_s(native_id, console), request.job.launch.grace_s):
                return super().run(request, plan, console)
        except PreemptedError as error:
            is_out_of_time = error.stopped_by == signal.SIGUSR1
            if is_out_of_time and batch.settings(request).requeue and native_id:
                _put_back(batch, native_id, request, error)
            raise

    def _known_limit_s(self, native_id: str, console: JobConsole) -> float:
        try:
            return self.time_limit_s(native_id) if native_id else math.inf
        except LaunchError as error:
            console.print(f"warning: the time limit of this job is unknown: {error.message}")
            return math.inf

    def no_allocation(self) -> LaunchError:
        """Return the error for a process without allocation."""
        batch = self.batch
        return LaunchError(
            f"this process has no {batch.system} allocation",
            hint=f"use launch.launcher: {batch.name} to get one, or call this inside a batch script or an "
            "interactive job",
        )


def seconds(text: str) -> float:
    """Return a time of Grid Engine or PBS in seconds.

    >>> seconds("1:30:00"), seconds("90"), seconds("INFINITY")
    (5400.0, 90.0, inf)
    """
    if not re.fullmatch(r"[\d:.]+", text):
        return math.inf
    total_s = 0.0
    for part in text.split(":"):
        total_s = 60 * total_s + float(part or 0)
    return total_s


def _put_back(batch: BatchLauncher, native_id: str, request: LaunchRequest, error: PreemptedError) -> None:
    """Requeue the job in which this process runs."""
    state = StateFile(request.log_dir)
    # Before the requeue, so that waiting clients see that the job has not ended.
    state.write("waiting", message=f"time limit reached, requeued; {error.message}")
    try:
        batch.put_back(native_id, request)
    except LaunchError:
        state.write("preempted", error.exit_code, error.message)
        raise


@contextmanager
def _notified(limit_s: float, grace_s: float) -> Iterator[None]:
    """Send SIGUSR1 to this process one grace period before the time limit of the job.

    A limit of less than two grace periods is divided in halves.
    """
    if math.isinf(limit_s):
        yield
        return
    left_s = limit_s - _age_s()
    timer = Timer(max(left_s - grace_s, left_s / 2, 0.0), os.kill, (os.getpid(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _age_s() -> float:
    """Return the time since the start of the batch script, the leader of this process's session."""
    try:
        return max(0.0, float(time() - psutil.Process(os.getsid(0)).create_time()))
    except psutil.NoSuchProcess:
        return 0.0
