"""Launch requests, launch plans, and the interface of launchers.

    LaunchRequest, LaunchPlan    job and folders of a launch, and its command, environment and files
    JobStatus, Submitted         status and record of a submitted job
    Launcher, PolledLauncher     interface of launchers, and base class of those that poll the status
    find_program, call           programs of the system, such as those of a batch system

A launcher converts a job into a ``LaunchPlan``: one command, its additional environment variables, and its
files. ``--dry-run`` prints the plan, and does nothing else.
"""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Literal, Protocol

from horovod_train.config.launch import Launch
from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, LauncherTimeoutError
from horovod_train.horovod.toolchain import programs_path
from horovod_train.launch.hosts.host_group import ssh_config
from horovod_train.launch.hosts.hostlist import Host, hosts_of

if TYPE_CHECKING:
    from horovod_train.launch.console import JobConsole

State = Literal[
    "queued", "starting", "running", "stopping", "succeeded", "failed", "preempted", "cancelled", "unknown"
]
# Time for which clients retry when the system of a launcher does not respond.
PATIENCE_S = 600.0
ENDED: frozenset[State] = frozenset({"succeeded", "failed", "preempted", "cancelled"})


@dataclass(frozen=True)
class LaunchRequest:
    """Job, run and folders of a launch.

    Attributes:
        job: Resolved job; ``launch.num_ranks`` and ``launch.launcher`` are set.
        run_id: Name of the run.
        run_dir: Absolute path of the job's folder, with checkpoints and a folder for each run.
        folder: Absolute path of the working directory of ranks.
        own_interface: This machine's network interface towards the hosts; None: not needed, or unknown.
        attempt: Index of the attempt of this run, from 0.
        program: Python module and arguments of a rank; empty: the worker.
        num_wanted: Requested number of ranks, if the job may start with fewer; None: ``num_ranks``.
        is_once: The run is not started if it has been started before.
        own_remote_shell: The value of ``remote_shell``, if it is not ssh.
    """

    job: Job
    run_id: str
    run_dir: Path
    folder: Path
    own_interface: str | None = None
    attempt: int = 0
    program: tuple[str, ...] = ()
    num_wanted: int | None = None
    is_once: bool = False
    own_remote_shell: tuple[str, ...] = ()

    @property
    def log_dir(self) -> Path:
        """Run folder, with the resolved job, the state and the output."""
        return self.run_dir / self.run_id

    @property
    def job_id(self) -> str:
        """ID of the job: its name, and the name of the run."""
        return f"{self.job.name}-{self.run_id}"

    @property
    def stage(self) -> str:
        """Folder on each host for the files that ranks start with."""
        # Created with mode 0700, and never reused: a lost host may still have the last one.
        return f"/tmp/horovod_train-{self.job_id}" + (f"-{self.attempt}" if self.attempt else "")  # noqa: S108

    @property
    def num_ranks(self) -> int:
        """Number of ranks to start."""
        return self.job.launch.num_ranks or 1

    @cached_property
    def hosts(self) -> list[Host]:
        """Hosts that run ranks."""
        return hosts_of(self.job.launch)

    @property
    def is_remote(self) -> bool:
        """Whether other machines run ranks."""
        return any(not host.is_local for host in self.hosts)

    @property
    def remote_shell(self) -> tuple[str, ...]:
        """Command prefix that runs a command on another host; the host and the command are appended to it."""
        return self.own_remote_shell or ("ssh", "-F", str(self.ssh_config))

    @property
    def ssh_config(self) -> Path:
        """Path of this run's ssh configuration."""
        return self.log_dir / "ssh_config"

    @property
    def files_for_ssh(self) -> dict[Path, str]:
        """Content of this run's ssh configuration by its path; empty if no other machine runs ranks."""
        return {self.ssh_config: ssh_config(self.job.launch.ssh)} if self.is_remote else {}

    @property
    def rank_command(self) -> str:
        """Command that starts one rank, on any host."""
        return f"{self.stage}/rank"


@dataclass(frozen=True)
class LaunchPlan:
    """Command, environment variables and files of a launch.

    Attributes:
        argv: Command that starts all ranks.
        env: Variables to add to the environment of the command.
        files: Contents by path; they are written before the command starts.
        note: Remark for readers of the plan; may be empty.
        is_display_only: ``argv`` is the equivalent command for a user; the launcher does not run it.
        tag: Pattern of the tag before each line of a rank, with the rank as its group; empty: the command
            prints one of the tags in ``events/wire.py``.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)
    note: str = ""
    is_display_only: bool = False
    tag: str = ""

    def write_files(self) -> None:
        """Write the files, and create missing folders."""
        for path, content in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
            if content.startswith("#!"):
                path.chmod(0o700)

    def as_text_with_files(self) -> str:
        """Return the plan as text, with the contents of its files."""
        files = [f"# {path}\n{content.rstrip()}\n" for path, content in self.files.items()]
        return "\n".join([*files, self._command()])

    def as_text(self) -> str:
        """Return the plan as shell commands, with the names and sizes of its files."""
        lines = [f"# writes {path} ({len(content)} bytes)" for path, content in self.files.items()]
        return "\n".join([*lines, self._command()])

    def _command(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        command = " \\\n  ".join([*variables, shlex.join(self.argv)])
        note = [f"# {self.note}"] if self.note else []
        return "\n".join([*note, f"# {command}" if self.is_display_only else command])


@dataclass(frozen=True)
class JobStatus:
    """Status of a submitted job.

    Attributes:
        exit_code: None: the job has not ended.
        message: Explanation of the state; may be empty.
        cause: Kind of failure of a failed job, as recorded by its launcher; empty: none.
        lost_ranks: Ranks that were killed, were frozen, or did not join a collective, if they are known.
    """

    state: State
    exit_code: int | None = None
    message: str = ""
    cause: str = ""
    lost_ranks: tuple[int, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether the state is final, or an exit code is known."""
        return self.state in ENDED or self.exit_code is not None

    def __str__(self) -> str:
        return f"{self.state}. {self.message}" if self.message else self.state


@dataclass(frozen=True)
class Submitted:
    """Record of a submitted job.

    Attributes:
        native_id: ID of the job for its launcher, such as a PID or a Slurm job ID. Until ``Launcher.submit``
            has returned, it is empty, or ends with a slash.
    """

    job_id: str
    launcher: str
    native_id: str
    log_dir: Path
    submitted_unix_s: float

    @property
    def is_started(self) -> bool:
        """Whether ``Launcher.submit`` has returned. If it was interrupted, the job may have been started."""
        return self.native_id.rpartition("/")[2] != ""


class Launcher(Protocol):
    """Interface of launchers, which start jobs and report their status.

    A launcher is created without arguments. ``PolledLauncher`` has defaults of all members but ``plan``,
    ``run``, ``submit``, ``status``, ``logs`` and ``cancel``. If ``starts_ranks``, ``horovod-train run`` calls
    ``run``; otherwise, it submits the job, follows its log, and waits for its end.

    Attributes:
        has_local_files: Whether the run folder is on this machine.
        queries_a_server: Whether a query of the status calls another system, such as Slurm or Kubernetes.
        starts_ranks: Whether ranks are started and supervised by this process.
        uses_this_machine: Whether ranks run on this machine if the job lists no hosts.
    """

    has_local_files: bool
    queries_a_server: bool
    starts_ranks: bool
    uses_this_machine: bool

    def suits(self, launch: Launch) -> bool:
        """Return whether ``launch.launcher: auto`` may choose this launcher.

        It chooses the first that may be chosen, in the order of the registry; those of other packages are not
        asked.
        """
        ...

    def hosts(self, environ: Mapping[str, str]) -> list[str]:
        """Return the hosts of jobs that list none, as ``host:slots``; empty: this machine.

        Raises:
            LaunchError: They cannot be determined.
        """
        ...

    def early_id(self, request: LaunchRequest) -> str:
        """Return the known beginning of the native ID before the start: empty, or ends with a slash."""
        ...

    def run(self, request: LaunchRequest, plan: LaunchPlan, console: JobConsole) -> int:
        """Start the ranks, supervise them until all have exited, and return the exit code of the job."""
        ...

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan that starts the ranks; has no effect.

        Raises:
            LaunchError: This launcher cannot start the job on this machine.
        """
        ...

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        """Start a job, and return its native ID without waiting for its end.

        A repeated call for the same run returns the native ID of the started job, and starts no second one,
        even if the process that made the first call was killed during the call.

        Raises:
            LaunchError: The job is rejected.
        """
        ...

    def status(self, job: Submitted) -> JobStatus:
        """Return the status of a job.

        Raises:
            LaunchError: The status cannot be determined.
        """
        ...

    def logs(self, job: Submitted, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a job's output; with ``follow``, until the job ends."""
        ...

    def cancel(self, job: Submitted, how: Literal["drain", "stop", "kill"]) -> None:
        """End a job.

        Args:
            job: Job to end.
            how: drain: the ranks save and exit, without a time limit; stop: the same, and ranks are killed
                after the grace period; kill: ranks are killed as soon as the system allows.
        """
        ...

    def wait(self, job: Submitted, timeout_s: float = math.inf) -> JobStatus:
        """Block until a job has ended, and return its status; raise ``TimeoutError`` after ``timeout_s``."""
        ...


class PolledLauncher:
    """Base class of launchers that poll the status of a job every ``poll_s`` seconds."""

    poll_s = 1.0
    has_local_files = True
    queries_a_server = True
    starts_ranks = False
    uses_this_machine = False

    def suits(self, launch: Launch) -> bool:
        """Return False."""
        del launch
        return False

    def hosts(self, environ: Mapping[str, str]) -> list[str]:
        """Return no hosts."""
        del environ
        return []

    def early_id(self, request: LaunchRequest) -> str:
        """Return an empty text."""
        del request
        return ""

    def run(self, request: LaunchRequest, plan: LaunchPlan, console: JobConsole) -> int:
        """Start ranks and supervise them, if ``starts_ranks``."""
        raise NotImplementedError

    def status(self, job: Submitted) -> JobStatus:
        """Return the status of a job."""
        raise NotImplementedError

    def wait(self, job: Submitted, timeout_s: float = math.inf) -> JobStatus:
        """Block until a job has ended, and return its status.

        Raises:
            LaunchError: The status could not be determined for ten minutes.
            TimeoutError: The job has not ended within ``timeout_s``.
        """
        begun_s = known_s = monotonic()
        while True:
            try:
                status = self.status(job)
            except LaunchError:
                if monotonic() - known_s > PATIENCE_S:
                    raise
            else:
                known_s = monotonic()
                if status.has_ended:
                    return status
            remaining_s = begun_s + timeout_s - monotonic()
            if remaining_s <= 0:
                raise TimeoutError(f"{job.job_id} has not ended within {timeout_s:g} s")
            sleep(min(self.poll_s, remaining_s))

    def is_running(self, job: Submitted) -> bool:
        """Return whether a job may still write to its log; True if its status cannot be determined."""
        try:
            return not self.status(job).has_ended
        except LaunchError:
            return True


TIMEOUT_S = 30.0


def find_program(name: str, *, hint: str) -> str:
    """Return the path of a program in this Python environment, or else on PATH.

    Raises:
        LaunchError: The program is not installed.
    """
    found = shutil.which(name, path=programs_path())
    if found is None:
        raise LaunchError(f"{name} is not installed here", hint=hint)
    return found


def call(*command: str, hint: str = "", with_errors: bool = False) -> str:
    """Run a command, and return its output.

    Args:
        command: Program and arguments.
        hint: Action for the user if the command does not respond.
        with_errors: Return its standard error, too.

    Raises:
        LaunchError: The program is not installed, does not respond, or fails; contains its message.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise LaunchError(
            f"{command[0]} is not installed here", hint="call this on a login node of the cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LauncherTimeoutError(
            f"{command[0]} did not answer within {TIMEOUT_S:g} s", hint=hint
        ) from error
    if done.returncode:
        # Grid Engine prints some errors to standard output.
        message = done.stderr.strip() or done.stdout.strip()
        raise LaunchError(f"{command[0]}: {message or f'exit code {done.returncode}'}")
    return done.stdout + done.stderr * with_errors
