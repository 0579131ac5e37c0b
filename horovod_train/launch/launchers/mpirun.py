"""Launcher that starts ranks with the engine's MPI library, on this machine or on ssh hosts."""

from __future__ import annotations

from dataclasses import replace

from horovod_train.config.launch import Launch
from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.launchers.supervised import SupervisedLauncher
from horovod_train.launch.mpi.start import mpi_of, start_of


class MpirunLauncher(SupervisedLauncher):
    """Launcher that calls the process manager of the MPI library, such as ``mpirun``."""

    def suits(self, launch: Launch) -> bool:
        """Return whether MPI starts the ranks."""
        return launch.controller == "mpi"

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan.

        Raises:
            LaunchError: The process manager is not installed, or the job requests the Gloo controller.
        """
        if request.job.launch.controller != "mpi":
            raise LaunchError(
                "the launcher 'mpirun' starts ranks for the MPI controller only",
                hint="use launch.launcher: horovodrun with launch.controller: gloo",
            )
        plan = start_of(mpi_of(request), request, request.hosts).plan(request)
        return replace(plan, files={**request.files_for_ssh, **plan.files})
