"""Launcher that starts ranks on the hosts of this process's LSF job. It was not run on an LSF system."""

from __future__ import annotations

import shutil
from dataclasses import replace

from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.launchers.allocation import AllocationLauncher
from horovod_train.launch.launchers.lsf.launcher import LsfLauncher
from horovod_train.launch.mpi import jsrun
from horovod_train.launch.mpi.start import mpi_of, start_of, with_environment

BLAUNCH = ("blaunch",)
"""LSF's remote shell."""


class LsfAllocationLauncher(AllocationLauncher):
    """Launcher that starts ranks in an LSF job. LSF sends SIGUSR1 before its time limit."""

    batch = LsfLauncher
    hosts_variable = "LSB_DJOB_HOSTFILE"

    def shell(self, request: LaunchRequest, host: Host) -> list[str]:
        """Return the command prefix that runs a command on a host of the job."""
        return [*BLAUNCH, host.name]

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan: jsrun where it is installed with Spectrum MPI, else the process manager of MPI."""
        mpi, request = mpi_of(request), replace(request, own_remote_shell=BLAUNCH)
        if mpi.name == "Spectrum MPI" and shutil.which("jsrun") is not None:
            return with_environment(mpi, jsrun.start(mpi, request, None)).plan(request)
        return start_of(mpi, request, request.hosts).plan(request)
