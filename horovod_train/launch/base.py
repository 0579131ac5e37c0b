"""How ranks get started: plan first, act second.

A launcher turns a job into a ``LaunchPlan``: one command, what it adds to the environment, and the
files it needs. The plan is a value; ``--dry-run`` prints it and nothing else happens.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import monotonic, sleep
from typing import Literal, Protocol

from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError
from horovod_train.launch.hosts.hostlist import Host, hosts_of
from horovod_train.launch.hosts.ssh import ssh_config

State = Literal[
    "waiting", "starting", "running", "leaving", "succeeded", "failed", "preempted", "cancelled", "unknown"
]
# Whoever waits for a job is patient with a system that does not answer, for so long.
PATIENCE_S = 600.0
ENDED: frozenset[State] = frozenset({"succeeded", "failed", "preempted", "cancelled"})


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be started.

    Attributes:
        job: The resolved job; ``launch.num_ranks`` and ``launch.launcher`` are set.
        run_id: Name of this run.
        run_dir: Folder of the job's runs, absolute: checkpoints, and a folder for each run.
        folder: Where the ranks are to run, absolute.
        own_interface: This machine's network interface towards the hosts; None: none is needed, or it
            is not known.
        attempt: How often the ranks of this run were started before.
        program: Python module and arguments of a rank; empty: the worker.
        num_wanted: Ranks that the job asked for, where it may be given fewer; None: as many as are started.
    """

    job: Job
    run_id: str
    run_dir: Path
    folder: Path
    own_interface: str | None = None
    attempt: int = 0
    program: tuple[str, ...] = ()
    num_wanted: int | None = None

    @property
    def log_dir(self) -> Path:
        """Folder of this run: its resolved job, its state and its output."""
        return self.run_dir / self.run_id

    @property
    def job_id(self) -> str:
        """ID of a submitted job."""
        return f"{self.job.name}-{self.run_id}"

    @property
    def stage(self) -> str:
        """Folder on each host for the files that ranks start with."""
        # Made with mode 0700, and never used again: a host that was lost may still have the last one.
        return f"/tmp/horovod_train-{self.job_id}" + (f"-{self.attempt}" if self.attempt else "")  # noqa: S108

    @property
    def num_ranks(self) -> int:
        """Ranks to start."""
        return self.job.launch.num_ranks or 1

    @cached_property
    def hosts(self) -> list[Host]:
        """Hosts that get ranks."""
        return hosts_of(self.job.launch)

    @property
    def is_remote(self) -> bool:
        """Whether other machines take part."""
        return any(not host.is_local for host in self.hosts)

    @property
    def ssh(self) -> tuple[str, ...]:
        """How ssh is called for this run."""
        return ("ssh", "-F", str(self.ssh_config))

    @property
    def ssh_config(self) -> Path:
        """The configuration that ssh is called with."""
        return self.log_dir / "ssh_config"

    @property
    def files_for_ssh(self) -> dict[Path, str]:
        """The configuration of ssh by its path, for a run that needs one."""
        return {self.ssh_config: ssh_config(self.job.launch.ssh)} if self.is_remote else {}

    @property
    def rank_command(self) -> str:
        """What starts one rank on any of the hosts."""
        return f"{self.stage}/rank"


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a launch does.

    Attributes:
        argv: The one command that starts all ranks.
        env: What is added to the environment of that command.
        files: Contents by path, written before.
        note: What a person who reads the plan should know; may be empty.
        is_by_hand: The command is what a person would do with the files; it is not called.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)
    note: str = ""
    is_by_hand: bool = False

    def write_files(self) -> None:
        """Write the files."""
        for path, content in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")

    def in_full(self) -> str:
        """Return the plan with the contents of its files."""
        files = [f"# {path}\n{content.rstrip()}\n" for path, content in self.files.items()]
        return "\n".join([*files, self._command()])

    def as_text(self) -> str:
        """Return the plan as commands that a person could type."""
        lines = [f"# writes {path} ({len(content)} bytes)" for path, content in self.files.items()]
        return "\n".join([*lines, self._command()])

    def _command(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        command = " \\\n  ".join([*variables, shlex.join(self.argv)])
        note = [f"# {self.note}"] if self.note else []
        return "\n".join([*note, f"# {command}" if self.is_by_hand else command])


@dataclass(frozen=True)
class JobStatus:
    """How a submitted job stands.

    Attributes:
        state: One word.
        exit_code: How it ended; None while it has not.
        message: What explains the state; may be empty.
        cause: Of a job that has failed, what kind of failure whoever carried it out has seen; empty: none.
        lost_ranks: Ranks that were killed, were frozen or missing from a collective, as far as that is known.
    """

    state: State
    exit_code: int | None = None
    message: str = ""
    cause: str = ""
    lost_ranks: tuple[int, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen, as far as can be known."""
        return self.state in ENDED or self.exit_code is not None

    def __str__(self) -> str:
        return f"{self.state}. {self.message}" if self.message else self.state


@dataclass(frozen=True)
class Submitted:
    """A job that was given to a launcher.

    Attributes:
        job_id: ID of the job.
        launcher: Which launcher has it.
        native_id: What that launcher, or the system behind it, calls it.
        log_dir: Folder of the run.
        submitted_unix_s: When.
    """

    job_id: str
    launcher: str
    native_id: str
    log_dir: Path
    submitted_unix_s: float


class Launcher(Protocol):
    """Starts jobs somewhere, and speaks about them afterwards.

    It is made without arguments. A launcher that starts ranks from this process has a method
    ``run(request, plan, console)`` as well, which stays with the job and returns its exit code;
    ``horovod-train run`` submits to the others, follows the log, and waits. One that finds hosts in the
    environment has ``hosts(environ)``, which returns them for jobs that name none.

    Attributes:
        has_local_files: Whether the folder of a run is one of this machine.
    """

    has_local_files: bool

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return what would start the ranks; has no effect.

        Raises:
            LaunchError: This launcher cannot start such a job here.
        """
        ...

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        """Start a job and return at once; returns what the launcher calls it.

        Raises:
            LaunchError: It was not accepted.
        """
        ...

    def status(self, job: Submitted) -> JobStatus:
        """Return how a job stands.

        Raises:
            LaunchError: That cannot be known.
        """
        ...

    def logs(self, job: Submitted, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a job's output, with ``follow`` until it ends."""
        ...

    def cancel(self, job: Submitted, how: Literal["drain", "stop", "kill"]) -> None:
        """End a job.

        Args:
            job: Which one.
            how: drain: save and leave, however long it takes; stop: the same, and kill when the grace
                is over; kill: at once.
        """
        ...

    def wait(self, job: Submitted) -> JobStatus:
        """Return how a job ended, when it has."""
        ...


class PolledLauncher:
    """What launchers have in common that can only be asked how a job stands.

    Attributes:
        poll_s: Time between two questions, in seconds.
    """

    poll_s = 1.0

    def status(self, job: Submitted) -> JobStatus:
        """Return how a job stands."""
        raise NotImplementedError

    def wait(self, job: Submitted) -> JobStatus:
        """Return how a job ended, when it has.

        Raises:
            LaunchError: That could not be known for ten minutes.
        """
        known_s = monotonic()
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
            sleep(self.poll_s)

    def is_running(self, job: Submitted) -> bool:
        """Return whether a job may still write to its log; also when that cannot be known now."""
        try:
            return not self.status(job).has_ended
        except LaunchError:
            return True
