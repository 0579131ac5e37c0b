"""Hydra, the process manager of MPICH, Intel MPI and MVAPICH.

=============  ==================================================================================
hosts, slots   ``-hosts host:slots`` (Intel MPI: ``-machinefile``); in an allocation, Hydra reads it
               (Slurm, PBS, Grid Engine, LSF)
environment    passed to ranks on all hosts; other hosts also have the environment file of the run
binding        ``-bind-to none`` (Intel MPI: I_MPI_PIN=0): ranks bind themselves (``launch.cpu_binding``)
output         ``-prepend-pattern``: ``[RANK]<stdout>:``, also for standard error
stdin          rank 0's; the launcher's is /dev/null
signals        the agents of the hosts deliver them
daemons        ``hydra_*_proxy`` through ``daemon`` of the run, so that the agents find and kill them
=============  ==================================================================================
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from signal import SIGVTALRM

from horovod_train.horovod.environment import on_loopback
from horovod_train.horovod.mpi import Mpi
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.hosts.hostlist import Host, as_argument
from horovod_train.launch.mpi.start import Start, program_of

# Hydra calls its launcher as `ssh -x HOST PROGRAM ARGUMENTS...`, with a host that is quoted by some versions.
_SSH = """#!/bin/sh
while [ "$1" != "${{1#-}}" ]; do shift; done
host=$1; shift
exec {ssh} "$host" {stage}/daemon "$@"
"""


def start(mpi: Mpi, request: LaunchRequest, hosts: Sequence[Host] | None) -> Start:
    """Return a start by Hydra."""
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
        argv += ["-iface", "lo"]  # without hosts, which are this one
        argv += ["-genv", "LD_PRELOAD", os.environ.get("LD_PRELOAD", "")] if preload else []
    return Start(argv, env, files)
