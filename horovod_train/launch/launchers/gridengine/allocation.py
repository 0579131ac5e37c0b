"""Launcher that starts ranks on the hosts of this process's Grid Engine job.

Hosts are reached by ``qrsh -inherit``: once for the agent of the host, and once for the daemon of the MPI
library's process manager.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.launchers.allocation import AllocationLauncher, seconds
from horovod_train.launch.launchers.gridengine.launcher import GridEngineLauncher
from horovod_train.launch.mpi.start import mpi_of, start_of


class GridEngineAllocationLauncher(AllocationLauncher):
    """Launcher that starts ranks in a Grid Engine job."""

    batch = GridEngineLauncher

    def hosts(self, environ: Mapping[str, str]) -> list[str]:
        """Return the hosts of the job as ``host:slots``, from the file in ``PE_HOSTFILE``."""
        if "JOB_ID" not in environ or "SGE_ROOT" not in environ:
            raise self.no_allocation()
        if "PE_HOSTFILE" not in environ:  # a job without a parallel environment has one slot
            return [f"{socket.gethostname()}:1"]
        slots: Counter[str] = Counter()  # a host is listed once for each of its queues
        for line in Path(environ["PE_HOSTFILE"]).read_text(encoding="utf-8").splitlines():
            host, count, *_ = line.split()
            slots[host] += int(count)
        return [f"{host}:{count}" for host, count in slots.items()]

    def shell(self, request: LaunchRequest, host: Host) -> list[str]:
        """Return the command prefix that runs a command on a host of the job."""
        return ["/bin/sh", "-c", _unnotified(_qrsh()), "sh", host.name]

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan."""
        qrsh = request.log_dir / "qrsh"
        request = replace(request, own_remote_shell=(str(qrsh),))
        plan = start_of(mpi_of(request), request, request.hosts).plan(request)
        return replace(
            plan,
            argv=("/bin/sh", "-c", _unnotified(""), "sh", *plan.argv),
            files={**plan.files, qrsh: f"#!/bin/sh\n{_unnotified(_qrsh())}\n"},
        )

    def time_limit_s(self, native_id: str) -> float:
        """Return ``h_rt`` of the job or of its queue, whichever is less."""
        batch = GridEngineLauncher()
        requested = re.findall(r"\bh_rt=([^,\s]+)", batch.fields(native_id).get("hard resource_list", ""))
        queue = os.environ.get("QUEUE", "")
        of_queue = (
            re.findall(r"^h_rt\s+([^,\s]+)", batch.call("qconf", "-sq", queue), re.MULTILINE) if queue else []
        )
        return min(map(seconds, [*requested, *of_queue]), default=math.inf)


def _qrsh() -> str:
    """Return the call of qrsh of this job's Grid Engine, which may not be on the PATH of a batch script."""
    folder = GridEngineLauncher().programs()
    return f"{shlex.quote(str(folder / 'qrsh') if folder is not None else 'qrsh')} -inherit"


def _unnotified(command: str) -> str:
    """Return a shell script that runs a command with its arguments, and is not ended by a notification.

    Grid Engine sends it to all processes of a job; only the launcher process reacts to it.
    """
    return f"trap '' USR1 USR2; exec {command} \"$@\""
