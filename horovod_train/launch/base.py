"""How ranks get started: plan first, act second.

A launcher turns a job into a ``LaunchPlan``: one command, what it adds to the environment, and the
files it needs. The plan is a value; ``--dry-run`` prints it and nothing else happens.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from horovod_train.config.schema import Job


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be started.

    Attributes:
        job: The resolved job; ``launch.num_ranks`` is set.
        run_id: Name of this run.
        run_dir: Folder of the job's runs, absolute: checkpoints, and a folder for each run.
    """

    job: Job
    run_id: str
    run_dir: Path

    @property
    def log_dir(self) -> Path:
        """Folder of this run: its resolved job and its output."""
        return self.run_dir / self.run_id

    @property
    def job_file(self) -> Path:
        """Where workers read the resolved job."""
        return self.log_dir / "job.json"

    @property
    def num_ranks(self) -> int:
        """Ranks to start."""
        return self.job.launch.num_ranks or 1

    def worker_command(self) -> tuple[str, ...]:
        """Return the command of one rank: the same for every launcher."""
        return (
            sys.executable,
            "-m",
            "horovod_train",
            "worker",
            "--events",
            "--run-id",
            self.run_id,
            str(self.job_file),
        )


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a launch does.

    Attributes:
        argv: The one command that starts all ranks.
        env: What is added to the environment of that command.
        files: Contents by path, written before.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[Path, str]

    def as_text(self) -> str:
        """Return the plan as commands that a person could type."""
        lines = [f"# writes {path} ({len(content)} bytes)" for path, content in self.files.items()]
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        return "\n".join([*lines, " \\\n  ".join([*variables, shlex.join(self.argv)])])


class Launcher(Protocol):
    """Makes plans."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return what would start the ranks; has no effect.

        Raises:
            LaunchError: This launcher cannot start such a job here.
        """
        ...


def rank_environment(job: Job, ranks_per_host: int) -> dict[str, str]:
    """Return the variables every rank starts with, whatever starts it.

    Ranks that share a host share its cores: a thread per core and rank would have them fight.
    """
    threads = job.launch.threads_per_rank or max(1, (os.cpu_count() or 1) // ranks_per_host)
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **job.launch.env,
    }
