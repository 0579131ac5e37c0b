"""Launcher that starts ranks with ``horovodrun``, on this machine or on ssh hosts."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from horovod_train.errors import LaunchError
from horovod_train.horovod.environment import open_mpi_on_loopback, open_mpi_without_ssh
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.hosts.hostlist import as_argument
from horovod_train.launch.launchers.supervised import SupervisedLauncher


class HorovodrunLauncher(SupervisedLauncher):
    """Launcher that calls ``horovodrun``."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan.

        Raises:
            LaunchError: ``horovodrun`` is not installed.
        """
        launch = request.job.launch
        argv = [
            find_program("horovodrun"),
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
        environment = {"PATH": path_of_this_environment()}
        if launch.controller == "mpi":
            environment |= open_mpi_settings(request)
        if request.is_remote:
            environment["HOROVOD_SSH"] = shlex.join(request.ssh)
        return LaunchPlan((*argv, request.rank_command), environment, request.files_for_ssh)


def open_mpi_settings(request: LaunchRequest) -> dict[str, str]:
    """Return the environment variables for Open MPI, for all launchers that call mpirun."""
    # Horovod's background thread polls MPI, and must yield if it shares a core with a compute thread.
    settings = {"OMPI_MCA_mpi_yield_when_idle": "1", **open_mpi_without_ssh()}
    if request.is_remote:
        settings["OMPI_MCA_plm_rsh_agent"] = shlex.join(request.ssh)
        settings["OMPI_MCA_orte_launch_agent"] = f"{request.stage}/orted"
    else:
        settings |= open_mpi_on_loopback(os.environ)
    return settings


def path_of_this_environment() -> str:
    """Return PATH, preceded by the programs of this Python environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def find_program(name: str) -> str:
    """Return the path of a program in this Python environment, or else on PATH.

    Raises:
        LaunchError: The program is not installed.
    """
    sibling = Path(sys.executable).with_name(name)
    found = str(sibling) if sibling.exists() else shutil.which(name)
    if found is None:
        raise LaunchError(
            f"{name} is not installed in this environment",
            hint="run `horovod-train engine build`, or train in one process with -n 1",
        )
    return found
