"""LSF. These launchers were not run on an LSF system.

LsfLauncher             batch scripts, which ``render`` and ``--dry-run`` print
LsfAllocationLauncher   starts ranks on the hosts of this process's LSF job
"""

from __future__ import annotations

import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.launchers.batch import SCRIPT, AllocationLauncher, BatchLauncher, BatchStatus, How
from horovod_train.launch.mpi import jsrun, mpi_of, start_of, with_environment
from horovod_train.plugins.lsf import LSF, Lsf


class LsfLauncher(BatchLauncher):
    """Launcher that renders jobs for ``bsub``; users submit them themselves."""

    batch_system = LSF
    id_variable = "LSB_JOBID"

    def submit_command(self, request: LaunchRequest, after: str = "") -> tuple[str, ...]:
        """Return the call of bsub, which reads the script from standard input."""
        return ("/bin/sh", "-c", f"bsub < {shlex.quote(str(request.log_dir / SCRIPT))}")

    def preamble(self, request: LaunchRequest) -> list[str]:
        settings = request.job.launch.settings(Lsf)
        options = [
            f"-J {request.job.name}",
            f"-n {request.num_ranks}",
            *([f'-R "span[ptile={settings.ranks_per_node}]"'] if settings.ranks_per_node else []),
            f"-o {shlex.quote(str(self.script_log(request.log_dir)))}",
            # SIGUSR1 before the time limit, in minutes.
            f"-wa USR1 -wt {math.ceil(request.job.launch.grace_s / 60)}",
            "-r" if settings.requeue else "-rn",
            *settings.options,
        ]
        return [f"#BSUB {option}" for option in options]

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        raise self._rendered_only()

    def submitted_id(self, script: Path) -> str:
        raise self._rendered_only()

    def query(self, native_id: str) -> BatchStatus | None:
        raise self._rendered_only()

    def end(self, native_id: str, how: How, *, is_waiting: bool) -> None:
        raise self._rendered_only()

    def put_back(self, native_id: str, request: LaunchRequest) -> None:
        """Requeue the job; LSF terminates this process shortly after."""
        self.call("brequeue", native_id)

    def _rendered_only(self) -> LaunchError:
        return LaunchError(
            "the launcher 'lsf' only renders batch scripts",
            hint="save the script that `horovod-train render JOB --launcher lsf` prints, and call bsub; "
            "`bkill -s USR2` drains the job",
        )


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
            return with_environment(mpi, jsrun(mpi, request, None)).plan(request)
        return start_of(mpi, request, request.hosts).plan(request)
