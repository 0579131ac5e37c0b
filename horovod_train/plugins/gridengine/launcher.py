"""Grid Engine (Son of Grid Engine, Open Grid Scheduler, Univa and Altair Grid Engine).

GridEngineLauncher             submits jobs
GridEngineAllocationLauncher   starts ranks on the hosts of this process's Grid Engine job
"""

from __future__ import annotations

import math
import os
import pwd
import re
import shlex
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from horovod_train.config.fields import words_of
from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.launchers.batch import (
    SCRIPT,
    AllocationLauncher,
    BatchLauncher,
    BatchStatus,
    How,
    seconds,
)
from horovod_train.launch.mpi import mpi_of, start_of
from horovod_train.plugins.gridengine import GRID_ENGINE, GridEngine


class GridEngineLauncher(BatchLauncher):
    """Launcher that submits jobs with ``qsub`` of Grid Engine."""

    batch_system = GRID_ENGINE
    id_variable = "JOB_ID"

    def submit_command(self, request: LaunchRequest, after: str = "") -> tuple[str, ...]:
        settings = request.job.launch.settings(GridEngine)
        name, environment = request.job.name, settings.parallel_environment
        return (
            *("qsub", "-terse", "-N", name if name[0].isalpha() else f"job-{name}"),
            *("-S", "/bin/bash", "-o", str(self.script_log(request.log_dir)), "-j", "y"),
            # -notify: SIGUSR2, with which this package drains a job, before SIGKILL.
            *("-notify", "-r", "y" if settings.requeue else "n"),
            *(("-pe", environment, str(request.num_ranks)) if environment else ()),
            *words_of(settings.options),
            # Not exit code 99, which requeues a job: Grid Engine would wait forever for nodes that ran tasks.
            *(("-hold_jid", after) if after else ()),
            str(request.log_dir / SCRIPT),
            *((after,) if after else ()),
        )

    def programs(self) -> Path | None:
        if "SGE_ROOT" not in os.environ or "ARC" not in os.environ:
            return None
        return Path(os.environ["SGE_ROOT"], "bin", os.environ["ARC"])

    def submitted_id(self, script: Path) -> str:
        for native_id in _rows(self.call("qstat", "-u", _account())):
            if self.fields(native_id).get("script_file") == str(script):
                return native_id
        return ""

    def query(self, native_id: str) -> BatchStatus | None:
        letters = _rows(self.call("qstat", "-u", _account())).get(native_id)
        if letters is None:
            return None
        if "E" in letters:  # its start failed
            found = re.search(r"error reason\s+\d+:\s*(.*)", self.call("qstat", "-j", native_id))
            return BatchStatus(
                "queued", letters, f"state {letters}: {found[1] if found else 'its start failed'}"
            )
        if "q" in letters:
            return BatchStatus("queued", letters, f"state {letters}")
        return BatchStatus("active", letters)

    def fields(self, native_id: str) -> dict[str, str]:
        """Return the fields that ``qstat -j`` prints for a job; empty: Grid Engine does not know the job."""
        try:
            printed = self.call("qstat", "-j", native_id)
        except LaunchError as error:
            if "do not exist" in error.message:
                return {}
            raise
        return dict(re.findall(r"^([a-z_ ]+):\s+(.*?)\s*$", printed, re.MULTILINE))

    def end(self, native_id: str, how: How, *, is_waiting: bool) -> None:
        """End a job with qdel, which sends SIGUSR2, and SIGKILL after the notify time of the queue."""
        self.call("qdel", native_id)


def _account() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _rows(printed: str) -> dict[str, str]:
    r"""Return the states of jobs by job ID, from the output of qstat.

    >>> _rows(" 7 0.5 train root r 11/28/2026 03:44:01 all.q@node1 2\n 8 0.0 train root qw 11/28/2026 ...\n")
    {'7': 'r', '8': 'qw'}
    """
    rows = (line.split() for line in printed.splitlines())
    return {row[0]: row[4] for row in rows if len(row) > 4 and row[0].isdecimal()}


class GridEngineAllocationLauncher(AllocationLauncher):
    """Launcher that starts ranks in a Grid Engine job.

    Hosts are reached by ``qrsh -inherit``: once for the agent of the host, and once for the daemon of the
    MPI library's process manager.
    """

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
