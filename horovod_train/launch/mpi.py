"""Choice of the process manager that belongs to the engine's MPI library.

Each process manager is a function that returns the command, the variables and the files of a start:

.. code-block:: text

    orte     Open MPI 4, Spectrum MPI      prrte    Open MPI 5
    hydra    MPICH, Intel MPI, MVAPICH     pals     Cray MPICH
    jsrun    Spectrum MPI in LSF           (srun: launchers/slurm/launcher.py)
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGVTALRM

from horovod_train.errors import LaunchError
from horovod_train.horovod.environment import on_loopback, open_mpi_without_ssh
from horovod_train.horovod.mpi import Mpi, find_mpi, installed_mpi
from horovod_train.horovod.toolchain import programs_path
from horovod_train.launch.base import LaunchPlan, LaunchRequest, find_program
from horovod_train.launch.hosts.hostlist import Host, as_argument
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


def orte(mpi: Mpi, request: LaunchRequest, hosts: Sequence[Host] | None) -> Start:
    """Return a start by ORTE, the process manager of Open MPI 4 and Spectrum MPI.

    =============  ==================================================================================
    hosts, slots   ``-H host:slots``; in Slurm none, because ORTE reads the allocation
    environment    passed to ranks on this host; other hosts have the environment file of the run
    binding        ``--bind-to none``: ranks bind themselves (``launch.cpu_binding``)
    output         ``--tag-output``: ``[1,RANK]<stdout>:``
    stdin          rank 0's; the launcher's is /dev/null
    signals        the agents of the hosts deliver them; mpirun passes on SIGTERM and SIGUSR1 only
    daemons        ``orted`` through ``daemon`` of the run, so that the agents find and kill it
    =============  ==================================================================================
    """
    argv = [
        program_of(mpi, "mpirun"),
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        "--tag-output",
        *("-np", str(request.num_ranks)),
        *(["-H", as_argument(hosts)] if hosts is not None else []),
        *("--bind-to", "none", "--map-by", "slot"),
        *transport(mpi),
    ]
    return Start(argv, environment(request))


def transport(mpi: Mpi) -> tuple[str, ...]:
    """Return the options that select a transport.

    With Open MPI's wheel, messages use TCP, as with horovodrun. An MPI library of the site chooses by its
    fabric, except for openib, which is superseded by UCX and is not safe with threads.
    """
    wheel = ("-mca", "pml", "ob1") if mpi.is_in_this_environment else ()
    return (*wheel, "-mca", "btl", "^openib")


def environment(request: LaunchRequest) -> dict[str, str]:
    """Return the environment variables of Open MPI 4, for all launchers that call its mpirun."""
    settings = {**YIELD_IN_OPEN_MPI, **open_mpi_without_ssh()}
    if request.is_remote:
        settings["OMPI_MCA_plm_rsh_agent"] = shlex.join(request.remote_shell)
        settings["OMPI_MCA_orte_launch_agent"] = f"{request.stage}/daemon orted"
    else:
        settings |= {"OMPI_MCA_oob_tcp_if_include": "lo", **on_loopback(os.environ)}
    return settings


TAG = r"\[(?:[^\s,\]]+,)?(\d+)\]<std(?:out|err)>: "


def prrte(mpi: Mpi, request: LaunchRequest, hosts: Sequence[Host] | None) -> Start:
    """Return a start by PRRTE, the process manager of Open MPI 5.

    =============  ==================================================================================
    hosts, slots   ``-H host:slots``; in Slurm none, because PRRTE reads the allocation
    environment    passed to ranks on this host; other hosts have the environment file of the run
    binding        ``--bind-to none``: ranks bind themselves (``launch.cpu_binding``)
    output         ``--output tag``: ``[1,RANK]<stdout>: ``, with a space that ORTE does not print
    stdin          rank 0's; the launcher's is /dev/null
    signals        the agents of the hosts deliver them
    daemons        ``prted`` through ``daemon`` of the run, so that the agents find and kill it
    =============  ==================================================================================
    """
    argv = [
        program_of(mpi, "mpirun"),
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        *("--output", "tag"),
        *("-np", str(request.num_ranks)),
        *(["-H", as_argument(hosts)] if hosts is not None else []),
        *("--bind-to", "none", "--map-by", "slot"),
        *(("--mca", "pml", "ob1") if mpi.is_in_this_environment else ()),
    ]
    if request.is_remote:
        env = {
            "PRTE_MCA_plm_ssh_agent": shlex.join(request.remote_shell),
            "PRTE_MCA_prte_launch_agent": f"{request.stage}/daemon prted",
        }
    else:
        env = on_loopback(os.environ)
    return Start(argv, env, tag=TAG)


# Hydra calls its launcher as `ssh -x HOST PROGRAM ARGUMENTS...`, with a host that is quoted by some versions.
_SSH = """#!/bin/sh
while [ "$1" != "${{1#-}}" ]; do shift; done
host=$1; shift
exec {ssh} "$host" {stage}/daemon "$@"
"""


def hydra(mpi: Mpi, request: LaunchRequest, hosts: Sequence[Host] | None) -> Start:
    """Return a start by Hydra, the process manager of MPICH, Intel MPI and MVAPICH.

    =============  ==================================================================================
    hosts, slots   ``-hosts host:slots`` (Intel MPI: ``-machinefile``); in Slurm none, because Hydra reads
                   the allocation
    environment    passed to ranks on all hosts; other hosts also have the environment file of the run
    binding        ``-bind-to none`` (Intel MPI: I_MPI_PIN=0): ranks bind themselves (``launch.cpu_binding``)
    output         ``-prepend-pattern``: ``[RANK]<stdout>:``, also for standard error
    stdin          rank 0's; the launcher's is /dev/null
    signals        the agents of the hosts deliver them
    daemons        ``hydra_*_proxy`` through ``daemon`` of the run, so that the agents find and kill them
    =============  ==================================================================================
    """
    is_intel = mpi.name == "Intel MPI"
    argv = [
        program_of(mpi, "mpiexec.hydra", "mpirun", "mpiexec"),
        *("-prepend-pattern", "[%r]<stdout>:"),
        *("-n", str(request.num_ranks)),
        *(() if is_intel else ("-bind-to", "none")),
    ]
    # SIGVTALRM instead of SIGKILL for the other ranks, to tell them from the one that was killed first.
    env = {"I_MPI_PIN": "0", "I_MPI_JOB_ABORT_SIGNAL": str(int(SIGVTALRM))} if is_intel else {}
    files: dict[Path, str] = {}
    if hosts is None:
        return Start(argv, env)
    if request.is_remote:
        if is_intel:
            machines = request.log_dir / "machinefile"
            files[machines] = "".join(f"{host.name}:{host.num_ranks}\n" for host in hosts)
            argv += ["-machinefile", str(machines)]
        else:
            argv += ["-hosts", as_argument(hosts)]
            argv += ["-localhost", next((host.name for host in hosts if host.is_local), "localhost")]
        ssh = request.log_dir / "ssh"
        files[ssh] = _SSH.format(ssh=shlex.join(request.remote_shell), stage=shlex.quote(request.stage))
        bootstrap = "bootstrap" if is_intel else "launcher"
        argv += [f"-{bootstrap}", "ssh", f"-{bootstrap}-exec", str(ssh)]
        argv += ["-iface", request.own_interface] if request.own_interface else []
    else:
        preload = on_loopback(os.environ)
        env |= preload
        argv += ["-iface", "lo"]  # a single host needs no list
        argv += ["-genv", "LD_PRELOAD", os.environ.get("LD_PRELOAD", "")] if preload else []
    return Start(argv, env, files)


def pals(_: Mpi, request: LaunchRequest, hosts: Sequence[Host] | None) -> Start:
    """Return a start by PALS, the process manager of Cray MPICH on HPE Cray systems with PBS.

    Not tested on such a system.

    =============  ==================================================================================
    hosts, slots   ``--hosts`` and ``--ppn``; the hosts of the allocation if there are none
    environment    passed to all ranks; each host also has the environment file of the run
    binding        ``--cpu-bind none``: ranks bind themselves (``launch.cpu_binding``)
    output         ``--line-buffer``, without a tag: logs of single ranks contain their events only
    stdin          rank 0's; the launcher's is /dev/null
    signals        the agents of the hosts deliver them
    daemons        palsd, a service of the system
    =============  ==================================================================================

    Raises:
        LaunchError: The hosts have different numbers of ranks.
    """
    sizes = {host.num_ranks for host in request.hosts}
    if len(sizes) != 1:
        raise LaunchError(
            f"PALS starts the same number of ranks on each host, and these have {sorted(sizes)}",
            hint="request as many ranks on each host",
        )
    argv = [
        *(find_program("mpiexec", hint=ON_A_NODE), "--line-buffer", "-n", str(request.num_ranks)),
        *("--ppn", str(sizes.pop()), "--cpu-bind", "none"),
        *(("--hosts", ",".join(host.name for host in hosts)) if hosts is not None else ()),
    ]
    return Start(argv)


def jsrun(_: Mpi, request: LaunchRequest, _hosts: Sequence[Host] | None) -> Start:
    """Return a start by jsrun, which starts ranks in allocations of LSF on IBM systems.

    Not tested on such a system.

    =============  ==================================================================================
    hosts, slots   one resource set for each rank, on the hosts of the allocation
    environment    passed to all ranks; each host also has the environment file of the run
    binding        ``--bind none``: ranks bind themselves (``launch.cpu_binding``)
    output         ``--stdio_mode prepended``: ``RANK: ``
    stdin          none
    signals        the agents of the hosts deliver them
    daemons        jsmd, a service of the system
    =============  ==================================================================================
    """
    per_host = max(host.num_ranks for host in request.hosts)
    argv = [
        *(find_program("jsrun", hint=ON_A_NODE), "--nrs", str(request.num_ranks), "--tasks_per_rs", "1"),
        *("--rs_per_host", str(per_host), "--bind", "none", "--stdio_mode", "prepended"),
    ]
    return Start(argv, tag=LABEL)
