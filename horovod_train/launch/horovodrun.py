"""Ranks on this machine or on ssh hosts, through Horovod's own launcher."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from horovod_train.config.rules import LOCAL_HOSTS
from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan, LaunchRequest, rank_environment


class HorovodrunLauncher:
    """Starts ranks with ``horovodrun``."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan.

        Raises:
            LaunchError: ``horovodrun`` is not installed.
        """
        launch = request.job.launch
        hosts = launch.hosts or [f"localhost:{request.num_ranks}"]
        slots = {host: int(n) for host, _, n in (entry.rpartition(":") for entry in hosts)}
        is_remote = any(host not in LOCAL_HOSTS for host in slots)
        argv = [
            find_horovodrun(),
            f"--{launch.controller}",
            "-np",
            str(request.num_ranks),
            "-H",
            ",".join(hosts),
        ]
        if is_remote and launch.ssh_port != 22:
            argv += ["--ssh-port", str(launch.ssh_port)]
        if launch.network_interface is not None:
            argv += ["--network-interfaces", launch.network_interface]
        if is_remote and launch.controller == "mpi" and _mpi_is_in_this_environment():
            # An ssh session has no PATH to this environment; mpirun has to bring its prefix along.
            argv += ["--mpi-args", f"--prefix {sys.prefix}"]
        return LaunchPlan(
            (*argv, *request.worker_command()), self._environment(request, max(slots.values())), {}
        )

    def _environment(self, request: LaunchRequest, ranks_per_host: int) -> dict[str, str]:
        bin_folder = str(Path(sys.executable).parent)
        environment = {"PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", os.defpath)])}
        if request.job.launch.controller == "mpi":
            # Horovod's background thread polls MPI. Where it shares a core with a rank's compute
            # thread, it has to give way.
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
        return {**environment, **rank_environment(request.job, ranks_per_host)}


def find_horovodrun() -> str:
    """Return the path of this environment's ``horovodrun``.

    Raises:
        LaunchError: There is none.
    """
    beside = Path(sys.executable).with_name("horovodrun")
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    if found is None:
        raise LaunchError(
            "horovodrun is not installed in this environment",
            hint="run `horovod-train engine build`, or train in one process with -n 1",
        )
    return found


def _mpi_is_in_this_environment() -> bool:
    return (Path(sys.prefix) / "bin" / "orted").exists()
