"""Launcher that starts ranks on the hosts of this process's PBS job.

Hosts are reached by ssh, because PBS's own remote shell (``pbs_tmrsh``) does not pass on standard input.
"""

from __future__ import annotations

from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.launchers.allocation import AllocationLauncher, seconds
from horovod_train.launch.launchers.horovodrun import HorovodrunLauncher
from horovod_train.launch.launchers.mpirun import MpirunLauncher
from horovod_train.launch.launchers.pbs.launcher import PbsLauncher


class PbsAllocationLauncher(AllocationLauncher):
    """Launcher that starts ranks in a PBS job: with mpirun, or with horovodrun for the Gloo controller."""

    batch = PbsLauncher
    hosts_variable = "PBS_NODEFILE"

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan."""
        is_mpi = request.job.launch.controller == "mpi"
        return (MpirunLauncher() if is_mpi else HorovodrunLauncher()).plan(request)

    def time_limit_s(self, native_id: str) -> float:
        """Return the walltime of the job."""
        return seconds(PbsLauncher().fields(native_id).get("Resource_List.walltime", "INFINITY"))
