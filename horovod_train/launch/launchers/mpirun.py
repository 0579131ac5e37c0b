"""Launcher that starts ranks with Open MPI's ``mpirun``, on this machine or on ssh hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence

from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.hosts.hostlist import Host, as_argument
from horovod_train.launch.launchers.horovodrun import (
    find_program,
    open_mpi_settings,
    path_of_this_environment,
)
from horovod_train.launch.launchers.supervised import SupervisedLauncher


class MpirunLauncher(SupervisedLauncher):
    """Launcher that calls ``mpirun`` of Open MPI 4."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan.

        Raises:
            LaunchError: ``mpirun`` is not installed, or the job requests the Gloo controller.
        """
        if request.job.launch.controller != "mpi":
            raise LaunchError(
                "the launcher 'mpirun' starts ranks for the MPI controller only",
                hint="use launch.launcher: horovodrun with launch.controller: gloo",
            )
        environment = {"PATH": path_of_this_environment(), **open_mpi_settings(request)}
        command = (*mpirun_command(request, request.hosts), request.rank_command)
        return LaunchPlan(command, environment, request.files_for_ssh)


def mpirun_command(request: LaunchRequest, hosts: Sequence[Host] | None) -> list[str]:
    """Return the mpirun command, without the program of a rank. ``hosts`` is None in a batch system.

    Raises:
        LaunchError: ``mpirun`` is not installed.
    """
    return [
        find_program("mpirun"),
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        "--tag-output",
        *("-np", str(request.num_ranks)),
        *(["-H", as_argument(hosts)] if hosts is not None else []),
        # Ranks bind themselves to cores (launch.cpu_binding).
        *("--bind-to", "none", "--map-by", "slot"),
        # As with horovodrun, MPI uses TCP; on InfiniBand, Horovod's traffic uses NCCL.
        *("-mca", "pml", "ob1", "-mca", "btl", "^openib"),
    ]
