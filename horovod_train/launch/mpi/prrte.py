"""PRRTE, the process manager of Open MPI 5.

=============  ==================================================================================
hosts, slots   ``-H host:slots``; in an allocation, PRRTE reads it (Slurm, PBS, Grid Engine, LSF)
environment    passed to ranks on this host; other hosts have the environment file of the run
binding        ``--bind-to none``: ranks bind themselves (``launch.cpu_binding``)
output         ``--output tag``: ``[1,RANK]<stdout>: ``, with a space that ORTE does not print
stdin          rank 0's; the launcher's is /dev/null
signals        the agents of the hosts deliver them
daemons        ``prted`` through ``daemon`` of the run, so that the agents find and kill it
=============  ==================================================================================
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from horovod_train.horovod.environment import on_loopback
from horovod_train.horovod.mpi import Mpi
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.hosts.hostlist import Host, as_argument
from horovod_train.launch.mpi.start import Start, program_of

TAG = r"\[(?:[^\s,\]]+,)?(\d+)\]<std(?:out|err)>: "


def start(mpi: Mpi, request: LaunchRequest, hosts: Sequence[Host] | None) -> Start:
    """Return a start by Open MPI 5."""
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
