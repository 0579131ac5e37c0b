"""Base classes of launchers of batch systems.

    BatchLauncher        launchers that submit a batch script, which runs the job on its allocated nodes
    AllocationLauncher   launchers that start ranks on the nodes that a batch system has allocated to this
                         process
    BatchStatus          state of a job in a batch system

A job that continues after its time limit is requeued, or another job is submitted that starts after its end
(``put_back``).
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from time import time
from typing import Literal

import psutil

from horovod_train.config.load import dump_job
from horovod_train.config.support import Batch, BatchSystem
from horovod_train.errors import LaunchError, PreemptedError
from horovod_train.launch.base import JobStatus, LaunchPlan, LaunchRequest, PolledLauncher, Submitted, call
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.hostlist import read_hostfile
from horovod_train.launch.jobs import LOG_FILE, StateFile, mark_cancelled, was_cancelled
from horovod_train.launch.launchers.hosts import SupervisedLauncher, read_log
from horovod_train.system.files import write_atomic

SCRIPT = "batch.sh"

How = Literal["drain", "stop", "kill"]
BatchState = Literal["queued", "active", "ending", "cancelled", "ended"]


@dataclass(frozen=True)
class BatchStatus:
    """State of a job in a batch system.

    Attributes:
        state: queued: in the queue; active: has nodes; ending: has nodes, and its script has ended;
            cancelled, ended: has left the queue, and the batch system still knows it.
        shown: State in the words of the batch system.
        reason: Reason for which the job waits; may be empty.
    """

    state: BatchState
    shown: str
    reason: str = ""


class BatchLauncher(PolledLauncher):
    """Base class of launchers of batch systems; subclasses call the programs of one batch system.

    Attributes:
        batch_system: The batch system.
        id_variable: Environment variable of the job ID in the batch script.
    """

    has_local_files = True
    queries_a_server = True
    batch_system: BatchSystem
    id_variable: str

    def submit_command(self, request: LaunchRequest, after: str = "") -> tuple[str, ...]:
        """Return the command that submits the batch script, and prints the job ID in its last line.

        Args:
            request: Job and run.
            after: ID of the job that this one continues; empty: none. The batch system starts this job after
                the end of that one, and passes the ID as the first argument of the script, which takes over
                the run.
        """
        raise NotImplementedError

    def preamble(self, request: LaunchRequest) -> list[str]:
        """Return the first lines of the batch script: options in comments, or commands that set variables.

        They run before the script reads ``id_variable``.
        """
        return []

    def submitted_id(self, script: Path) -> str:
        """Return the ID of a job of this account in the queue, by its script; empty: none.

        Raises:
            LaunchError: The batch system does not respond.
        """
        raise NotImplementedError

    def query(self, native_id: str) -> BatchStatus | None:
        """Return the state of a job in the batch system; None: it does not know the job.

        Raises:
            LaunchError: The batch system does not respond.
        """
        raise NotImplementedError

    def end(self, native_id: str, how: How, *, is_waiting: bool) -> None:
        """End a job, or remove it from the queue if it waits."""
        raise NotImplementedError

    def settings(self, request: LaunchRequest) -> Batch:
        """Return the section of the job for this batch system."""
        return request.job.launch.settings(self.batch_system.settings)

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan: a batch script, and the command that submits it."""
        script = request.log_dir / SCRIPT
        inside = f"{self.batch_system.launcher}-allocation"
        launch = request.job.launch.model_copy(update={"launcher": inside, "hosts": []})
        inner = request.job.model_copy(update={"launch": launch})
        return LaunchPlan(
            self.submit_command(request),
            files={script: self.script(request), request.log_dir / "request.json": dump_job(inner)},
        )

    def script(self, request: LaunchRequest) -> str:
        """Return the batch script, which runs on the first node of the job."""
        run_attempt = shlex.join(
            (
                *(sys.executable, "-P", "-m", "horovod_train", "run", str(request.log_dir / "request.json")),
                *("--resolved", "--run-id", request.run_id),
            )
        )
        file, own_id = shlex.quote(str(self.job_id_file(request.log_dir))), f'"${self.id_variable}"'
        return "\n".join(
            [
                "#!/bin/bash",
                *self.preamble(request),
                # If this run was submitted several times, one job carries it out: the first that writes its
                # ID, which a requeued job keeps,
                f"(set -C; echo {own_id} >{file}) 2>/dev/null",
                # or a job that continues that one, whose ID is its argument;
                f'[ "$(cat {file})" != "$1" ] || echo {own_id} >{file}',
                # all others end.
                f'[ "$(cat {file})" = {own_id} ] || exit 0',
                *self.settings(request).setup,
                f"cd {shlex.quote(str(request.folder))}",
                # Replaces the script, so that it receives the signals of the batch system.
                f"exec {run_attempt}",
                "",
            ]
        )

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        """Submit the job, and return its ID in the batch system."""
        if started := self._native_id(request.log_dir):
            return started
        plan.write_files()
        return self._submitted(*plan.argv)

    def _submitted(self, *command: str) -> str:
        return self.call(*command).strip().rpartition("\n")[2].partition(";")[0]

    def status(self, job: Submitted) -> JobStatus:
        native_id = self._native_id(job.log_dir, job.native_id)
        if not native_id:
            return JobStatus(
                "queued", message=f"not in {self.batch_system.title}'s queue: its submission was interrupted"
            )
        queued = self.query(native_id)
        # Read afterwards, because a job that has ended has written its final state before.
        own = StateFile(job.log_dir).read_recorded()
        if queued is not None and queued.state == "queued":
            return JobStatus(
                "queued", message=f"in {self.batch_system.title}'s queue: {queued.reason or queued.shown}"
            )
        if queued is not None and queued.state in ("active", "ending"):
            # The final state may be that of an attempt before the job was requeued.
            is_old = own.has_ended and queued.state != "ending"
            return JobStatus("starting") if is_old or own.state == "queued" else own
        if own.has_ended:
            return own
        if (queued is not None and queued.state == "cancelled") or was_cancelled(job.log_dir):
            return JobStatus("cancelled", 143, f"cancelled in {self.batch_system.title}; before that: {own}")
        shown = "no job with this ID" if queued is None else queued.shown
        return JobStatus(
            "failed",
            1,
            f"{self.batch_system.title} reports {shown}, but the state file has no final state: see "
            f"{self.script_log(job.log_dir)}",
        )

    def logs(self, job: Submitted, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a job's output."""
        log = job.log_dir / LOG_FILE
        yield from read_log(log, lambda: follow and self.is_running(job))
        if not log.exists():  # the job failed before it opened its log
            yield from read_log(self.script_log(job.log_dir), lambda: False)

    def cancel(self, job: Submitted, how: How) -> None:
        """End a job; a job that waits is removed from the queue."""
        status = self.status(job)
        if status.has_ended:
            return
        is_waiting = status.state == "queued"
        if how != "drain" or is_waiting:
            mark_cancelled(job.log_dir)
        if native_id := self._native_id(job.log_dir, job.native_id):
            self.end(native_id, how, is_waiting=is_waiting)

    def programs(self) -> Path | None:
        """Return the folder of the batch system's programs; None: they are on PATH."""
        return None

    def call(self, program: str, *arguments: str) -> str:
        """Run a program of the batch system, and return its output."""
        folder = self.programs()
        own = str(folder / program) if folder is not None and (folder / program).exists() else program
        return call(own, *arguments, hint=f"check whether the server of {self.batch_system.title} is running")

    def put_back(self, native_id: str, request: LaunchRequest) -> None:
        """Requeue the job in which this process runs: a new job starts after the end of this one.

        Raises:
            LaunchError: The batch system rejects the job.
        """
        new_id = self._submitted(*self.submit_command(request, native_id))
        write_atomic(self.job_id_file(request.log_dir), f"{new_id}\n")

    def _native_id(self, log_dir: Path, submitted: str = "") -> str:
        """Return the ID of the batch job of a run, running or queued; empty: none.

        Args:
            log_dir: Run folder.
            submitted: ID of the job that was submitted; empty: unknown.

        Raises:
            LaunchError: The batch system does not respond.
        """
        with suppress(OSError):
            if claimed := self.job_id_file(log_dir).read_text(encoding="utf-8").strip():
                return claimed
        if submitted or not (log_dir / SCRIPT).exists():
            return submitted
        # The job was submitted, and this process or an earlier one was killed before it had read the ID.
        return self.submitted_id(log_dir / SCRIPT)

    def job_id_file(self, log_dir: Path) -> Path:
        """Return the file with the ID of the batch job that carries out a run."""
        return log_dir / f"{self.batch_system.launcher}-job-id"

    def script_log(self, log_dir: Path) -> Path:
        """Return the file with the output of the batch script."""
        return log_dir / f"{self.batch_system.launcher}.log"


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
        system = self.batch.batch_system
        return LaunchError(
            f"this process has no {system.title} allocation",
            hint=f"use launch.launcher: {system.launcher} to get one, or call this inside a batch script or "
            "an interactive job",
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
    state.write("queued", message=f"time limit reached, requeued; {error.message}")
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
