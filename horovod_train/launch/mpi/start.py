"""Choice of the process manager that belongs to the engine's MPI library.

Each process manager is a function that returns the command, the variables and the files of a start:

.. code-block:: text

    orte     Open MPI 4, Spectrum MPI      prrte    Open MPI 5
    hydra    MPICH, Intel MPI, MVAPICH     pals     Cray MPICH
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from horovod_train.errors import LaunchError
from horovod_train.horovod.mpi import Mpi, find_mpi, installed_mpi
from horovod_train.horovod.toolchain import programs_path
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.registry import PROCESS_MANAGERS

ON_A_NODE = "call this on a node of the cluster"
REBUILD = "run `horovod-train engine build`, with the module of the MPI library loaded"


@dataclass(frozen=True)
class Start:
    """Start of ranks by a process manager.

    Attributes:
        argv: Command, without the program of a rank.
        env: Variables of the command.
        files: Contents of files that the command needs, by path.
        tag: Pattern of the tag before each line of a rank, with the rank as its group; empty: ``TAG`` of
            ``events/wire.py``.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)
    tag: str = ""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan that starts the ranks of a request."""
        return LaunchPlan((*self.argv, request.rank_command), self.env, self.files, tag=self.tag)


YIELD_IN_OPEN_MPI = {"OMPI_MCA_mpi_yield_when_idle": "1"}
YIELD_WHEN_IDLE = {**YIELD_IN_OPEN_MPI, "I_MPI_THREAD_YIELD": "2"}
"""Variables of ranks. Horovod's background thread polls MPI, and must yield if it shares a core."""

LABEL = r"\s*(\d+): ?"
"""Tag of srun and jsrun before each line of a rank: its number."""

ProcessManager = Callable[[Mpi, LaunchRequest, Sequence[Host] | None], Start]
"""Function of the MPI library, the request, and the hosts (None: the batch system knows them)."""


def mpi_of(request: LaunchRequest) -> Mpi:
    """Return the MPI library that starts ranks: that of the engine, or of this machine for a container.

    Raises:
        LaunchError: There is no record of it, or the library no longer exists.
    """
    mpi = installed_mpi()
    if mpi is None and request.job.launch.container is not None:
        mpi = find_mpi()
    if mpi is None:
        raise LaunchError("the MPI library of the engine is unknown", hint=REBUILD)
    if not mpi.library.exists():
        raise LaunchError(f"the engine uses {mpi}, but {mpi.library} does not exist", hint=REBUILD)
    return mpi


def start_of(mpi: Mpi, request: LaunchRequest, hosts: Sequence[Host] | None) -> Start:
    """Return the start of ranks by the process manager of an MPI library.

    Raises:
        LaunchError: The program of the process manager is not installed.
    """
    manager: ProcessManager = PROCESS_MANAGERS.load(mpi.manager)
    return with_environment(mpi, manager(mpi, request, hosts))


def with_environment(mpi: Mpi, start: Start) -> Start:
    """Return a start with the variables that the MPI library and its ranks need."""
    return replace(start, env={**environment_of(mpi), **YIELD_WHEN_IDLE, **start.env})


def environment_of(mpi: Mpi) -> dict[str, str]:
    """Return the variables with which commands of this Python environment use an MPI library."""
    path = {"PATH": programs_path()}
    return path | mpi.environment({**os.environ, **path})


def program_of(mpi: Mpi, *names: str) -> str:
    """Return the path of the first of these programs of an MPI library.

    Raises:
        LaunchError: It has none of them.
    """
    for name in names:
        if found := shutil.which(name, path=str(mpi.programs)):
            return found
    raise LaunchError(
        f"{mpi} has no {' or '.join(names)} in {mpi.programs}",
        hint="install its process manager, or start the ranks with Slurm (launch.slurm.mpi: srun)",
    )
