"""Launcher that starts ranks with ``horovodrun``, on this machine or on ssh hosts."""

from __future__ import annotations

import shlex

from horovod_train.config.launch import Launch
from horovod_train.errors import LaunchError
from horovod_train.horovod.mpi import installed_mpi
from horovod_train.horovod.toolchain import programs_path
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.commands import find_program
from horovod_train.launch.hosts.hostlist import as_argument
from horovod_train.launch.launchers.supervised import SupervisedLauncher
from horovod_train.launch.mpi.orte import environment
from horovod_train.launch.mpi.start import environment_of, mpi_of

BUILD = "run `horovod-train engine build`, or train in one process with -n 1"


class HorovodrunLauncher(SupervisedLauncher):
    """Launcher that calls ``horovodrun``."""

    def suits(self, launch: Launch) -> bool:
        """Return whether horovodrun supports the MPI library; the hosts of a container have no horovodrun."""
        if launch.controller != "mpi":
            return True
        mpi = installed_mpi()
        return launch.container is None and (mpi is None or mpi.is_for_horovodrun)

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan.

        Raises:
            LaunchError: ``horovodrun`` is not installed, or does not support the MPI library.
        """
        launch = request.job.launch
        argv = [
            find_program("horovodrun", hint=BUILD),
            f"--{launch.controller}",
            "-np",
            str(request.num_ranks),
            "-H",
            as_argument(request.hosts),
            # The cache of host checks is in the home folder, which may be read-only.
            "--disable-cache",
        ]
        if request.is_remote:
            # Without this option, horovodrun finds interfaces by exchanging pickles over the network
            # (CVE-2024-10190 and similar). The environment of ranks contains the interface of their host.
            argv += ["--network-interfaces", request.own_interface or "UNKNOWN"]
        env = {"PATH": programs_path()}
        if launch.controller == "mpi":
            mpi = mpi_of(request)
            if not mpi.is_for_horovodrun:
                raise LaunchError(
                    f"horovodrun starts ranks with Open MPI 4 only, and the engine uses {mpi}",
                    hint="leave launch.launcher out, or use launch.launcher: mpirun",
                )
            env |= environment_of(mpi) | environment(request)
        if request.is_remote:
            env["HOROVOD_SSH"] = shlex.join(request.remote_shell)
        return LaunchPlan((*argv, request.rank_command), env, request.files_for_ssh)
