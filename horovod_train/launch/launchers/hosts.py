"""Launchers that start ranks on this machine or on ssh hosts.

    SupervisedLauncher   base class
    LocalLauncher        one rank in one process, without Horovod, for first tries, tests and debuggers
    HorovodrunLauncher   ``horovodrun``
    MpirunLauncher       ``mpirun``, or another process manager of the MPI library

These launchers supervise ranks from a process on this machine.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Literal

from horovod_train.config.launch import Launch
from horovod_train.config.load import dump_job
from horovod_train.errors import LaunchError
from horovod_train.events.file import EVENTS_FILE, EventsFile, opened
from horovod_train.events.types import StateChanged
from horovod_train.horovod.mpi import installed_mpi
from horovod_train.horovod.toolchain import programs_path
from horovod_train.launch.base import (
    JobStatus,
    LaunchPlan,
    LaunchRequest,
    PolledLauncher,
    Submitted,
    find_program,
)
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.hostlist import Host, as_argument
from horovod_train.launch.jobs import LOG_FILE, StateFile, mark_cancelled
from horovod_train.launch.mpi import environment, environment_of, mpi_of, start_of
from horovod_train.launch.supervise.attempt import run_attempt
from horovod_train.launch.supervise.elastic import run_again
from horovod_train.launch.supervise.follow import WriteEvents
from horovod_train.launch.supervise.signals import deferred_signals
from horovod_train.system.files import make_folder, write_atomic
from horovod_train.system.processes import SENT_TO_END, exit_code_of

POLL_S = 0.2


class SupervisedLauncher(PolledLauncher):
    """Launcher that runs a command on this machine; subclasses define the command."""

    starts_ranks = True
    uses_this_machine = True
    has_local_files = True
    queries_a_server = False
    poll_s = POLL_S

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the command and files that start the ranks."""
        raise NotImplementedError

    def shell(self, request: LaunchRequest, host: Host) -> list[str]:
        """Return the command prefix that runs a command on a host; the command is appended to it."""
        return [*request.remote_shell, host.name]

    def run(self, request: LaunchRequest, plan: LaunchPlan, console: JobConsole) -> int:
        """Start the ranks, supervise them until all have exited, and return the exit code of the job.

        Raises:
            HorovodTrainError: The job failed, was preempted or cancelled.
        """
        make_folder(request.run_dir, request.job.run_dir_access)
        request.log_dir.mkdir(exist_ok=True)
        events = EventsFile(
            request.log_dir / EVENTS_FILE, lambda problem: state.set_warning(EVENTS_FILE, problem)
        )
        state = StateFile(
            request.log_dir,
            console.print,
            lambda state, message: events.write(StateChanged(state=state, message=message)),
        )
        if request.is_once:
            with suppress(OSError):  # the next write reports it
                if not state.claim():
                    console.print(f"run {request.run_id} was started before")
                    return 0
        events.write(opened(request.job.name, request.run_id))
        state.write("starting")
        followers = [WriteEvents(events)]
        try:
            with deferred_signals() as pending_signals, state.touched():
                launch = request.job.launch
                if launch.elastic is not None or launch.restarts is not None:
                    plan.write_files()  # each attempt has its own plan
                    run_again(self, request, console, state, pending_signals, followers, events.write)
                else:
                    run_attempt(
                        self,
                        request,
                        plan,
                        console,
                        state,
                        pending_signals=pending_signals,
                        followers=followers,
                        record=events.write,
                    )
        except BaseException as error:
            state.end(error)
            raise
        else:
            state.write("succeeded", 0)
            return 0
        finally:
            events.close()

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        """Start a separate process that runs the job; return its PID."""
        state = StateFile(request.log_dir)
        if (started := state.recorded_pid()) is not None:
            return str(started)
        make_folder(request.run_dir, request.job.run_dir_access)
        request.log_dir.mkdir(exist_ok=True)
        write_atomic(request.log_dir / "request.json", dump_job(request.job))
        with (request.log_dir / "launcher.log").open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "horovod_train", "run", str(request.log_dir / "request.json"),
                    "--resolved", "--once",
                    "--run-id", request.run_id,
                ],
                cwd=request.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )  # fmt: skip
        deadline_s = monotonic() + 30
        while True:
            # Queried before the state is read, because another process may run the job.
            has_exited = process.poll() is not None
            if state.read().state != "queued":
                break
            if has_exited or monotonic() > deadline_s:
                text = (request.log_dir / "launcher.log").read_text(encoding="utf-8").strip()
                process.kill()  # otherwise, it would train without a known job ID
                process.wait()
                raise LaunchError(
                    f"the job could not be started: {text or 'the launcher process wrote no state for 30 s'}"
                )
            sleep(POLL_S / 4)
        Thread(target=process.wait, daemon=True).start()  # reaps the process, if this one outlives it
        return str(process.pid)

    def status(self, job: Submitted) -> JobStatus:
        state = StateFile(job.log_dir)
        if not job.is_started and state.recorded_pid() is None:
            return JobStatus("queued", message="its submission is in progress, or was interrupted")
        return state.read()

    def logs(self, job: Submitted, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a job's output."""
        yield from read_log(job.log_dir / LOG_FILE, lambda: follow and self.is_running(job))

    def cancel(self, job: Submitted, how: Literal["drain", "stop", "kill"]) -> None:
        """Send signals to the launcher process of the job, so that it ends the job."""
        status = self.status(job)
        if status.has_ended:
            return
        state = StateFile(job.log_dir)
        if status.state == "queued":  # its submission is in progress, or was interrupted
            try:
                job.log_dir.mkdir(parents=True, exist_ok=True)
                if state.claim("cancelled", exit_code_of(signal.SIGTERM), "cancelled before it was started"):
                    return
            except OSError as error:
                raise LaunchError(f"{job.job_id} cannot be cancelled: {error}") from error
        pid = state.pid()
        if pid is None:
            raise LaunchError(
                f"the launcher of {job.job_id} does not run on this host: {status}",
                hint="run the command on that host; if it is down, its ranks have ended: start the job again",
            )
        if how != "drain":
            mark_cancelled(job.log_dir)
        for number in SENT_TO_END[how]:
            with suppress(ProcessLookupError):  # it may have exited after the first signal
                os.kill(pid, number)
            sleep(POLL_S)


def read_log(path: Path, is_going_on: Callable[[], bool]) -> Iterator[str]:
    """Yield the lines of a file, which may not exist yet, until ``is_going_on`` returns False."""
    while not path.exists() and is_going_on():
        sleep(POLL_S)
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as log:
        while True:
            # Queried before reading, so that lines written just before the end are read, too.
            is_running = is_going_on()
            for line in log:
                yield line.rstrip("\n")
            if not is_running:
                return
            sleep(POLL_S)


class LocalLauncher(SupervisedLauncher):
    """Launcher that starts only the worker."""

    def suits(self, launch: Launch) -> bool:
        """Return whether the job has one rank on this machine."""
        return launch.is_alone

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan.

        Raises:
            LaunchError: The job requests more than one rank.
        """
        if request.num_ranks > 1:
            raise LaunchError(
                f"the launcher 'local' starts one rank, not {request.num_ranks}",
                hint="use launch.launcher: horovodrun",
            )
        return LaunchPlan((request.rank_command,))


BUILD = "run `horovod-train engine build`, or train in one process with -n 1"


class HorovodrunLauncher(SupervisedLauncher):
    """Launcher that calls ``horovodrun``."""

    def suits(self, launch: Launch) -> bool:
        """Return whether horovodrun supports the MPI library; the hosts of a container have no horovodrun."""
        if launch.controller != "mpi":
            return True
        mpi = installed_mpi()
        return launch.container is None and (mpi is None or mpi.is_for_horovodrun)

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan.

        Raises:
            LaunchError: ``horovodrun`` is not installed, or does not support the MPI library.
        """
        launch = request.job.launch
        argv = [
            find_program("horovodrun", hint=BUILD),
            f"--{launch.controller}",
            "-np",
            str(request.num_ranks),
            "-H",
            as_argument(request.hosts),
            # The cache of host checks is in the home folder, which may be read-only.
            "--disable-cache",
        ]
        if request.is_remote:
            # Without this option, horovodrun finds interfaces by exchanging pickles over the network
            # (CVE-2024-10190 and similar). The environment of ranks contains the interface of their host.
            argv += ["--network-interfaces", request.own_interface or "UNKNOWN"]
        env = {"PATH": programs_path()}
        if launch.controller == "mpi":
            mpi = mpi_of(request)
            if not mpi.is_for_horovodrun:
                raise LaunchError(
                    f"horovodrun starts ranks with Open MPI 4 only, and the engine uses {mpi}",
                    hint="leave launch.launcher out, or use launch.launcher: mpirun",
                )
            env |= environment_of(mpi) | environment(request)
        if request.is_remote:
            env["HOROVOD_SSH"] = shlex.join(request.remote_shell)
        return LaunchPlan((*argv, request.rank_command), env, request.files_for_ssh)


class MpirunLauncher(SupervisedLauncher):
    """Launcher that calls the process manager of the MPI library, such as ``mpirun``."""

    def suits(self, launch: Launch) -> bool:
        return launch.controller == "mpi"

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan.

        Raises:
            LaunchError: The process manager is not installed, or the job requests the Gloo controller.
        """
        if request.job.launch.controller != "mpi":
            raise LaunchError(
                "the launcher 'mpirun' starts ranks for the MPI controller only",
                hint="use launch.launcher: horovodrun with launch.controller: gloo",
            )
        plan = start_of(mpi_of(request), request, request.hosts).plan(request)
        return replace(plan, files={**request.files_for_ssh, **plan.files})
