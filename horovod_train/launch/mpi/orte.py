"""ORTE, the process manager of Open MPI 4 and Spectrum MPI.

=============  ==================================================================================
hosts, slots   ``-H host:slots``; in an allocation, ORTE reads it (Slurm, PBS, Grid Engine)
environment    passed to ranks on this host; other hosts have the environment file of the run
binding        ``--bind-to none``: ranks bind themselves (``launch.cpu_binding``)
output         ``--tag-output``: ``[1,RANK]<stdout>:``
stdin          rank 0's; the launcher's is /dev/null
signals        the agents of the hosts deliver them; mpirun passes on SIGTERM and SIGUSR1 only
daemons        ``orted`` through ``daemon`` of the run, so that the agents find and kill it
=============  ==================================================================================
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from horovod_train.horovod.environment import on_loopback, open_mpi_without_ssh
from horovod_train.horovod.mpi import Mpi
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.hosts.hostlist import Host, as_argument
from horovod_train.launch.mpi.start import YIELD_IN_OPEN_MPI, Start, program_of


def start(mpi: Mpi, request: LaunchRequest, hosts: Sequence[Host] | None) -> Start:
    """Return a start by Open MPI 4."""
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
