"""Launcher that starts ranks on the nodes of this process's Slurm allocation (``sbatch`` or ``salloc``).

controller: mpi     mpirun, which starts its daemons through Slurm, or srun --mpi (launch.slurm.mpi)
controller: gloo    srun, with a Slurm task for each rank
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping

from horovod_train.errors import LaunchError
from horovod_train.horovod.mpi import Mpi
from horovod_train.horovod.toolchain import programs_path
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.commands import call
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.launchers.allocation import AllocationLauncher
from horovod_train.launch.launchers.slurm import Slurm, srun
from horovod_train.launch.launchers.slurm.launcher import SlurmLauncher
from horovod_train.launch.mpi.start import LABEL, Start, mpi_of, start_of, with_environment


class SlurmAllocationLauncher(AllocationLauncher):
    """Launcher that starts ranks in a Slurm allocation. Slurm sends SIGUSR1 before its time limit."""

    batch = SlurmLauncher

    def hosts(self, environ: Mapping[str, str]) -> list[str]:
        """Return the nodes of the allocation as ``host:slots``.

        Raises:
            LaunchError: This process has no allocation, or is in a step on some of its nodes.
        """
        if "SLURM_JOB_NODELIST" not in environ:
            raise self.no_allocation()
        listed = call("scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"])
        slots = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "1"))
        if len(listed.split()) != len(slots):
            raise LaunchError(
                f"this process is in a step on {len(slots)} of the {len(listed.split())} nodes of its "
                "allocation",
                hint="start the job from salloc or the batch script itself, and not inside srun",
            )
        return [f"{name}:{n}" for name, n in zip(listed.split(), slots, strict=True)]

    def shell(self, request: LaunchRequest, host: Host) -> list[str]:
        """Return the command prefix that runs a command on a node, in an overlapping step."""
        return [
            *("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--quiet"),
            *("/bin/sh", "-c"),
        ]

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan."""
        if request.job.launch.controller == "mpi":
            return start_in_allocation(mpi_of(request), request).plan(request)
        placed = [f"{host.name}:{host.num_ranks}" for host in request.hosts]
        return LaunchPlan(
            (
                *(sys.executable, "-P", "-m", "horovod_train.horovod.rendezvous", ",".join(placed)),
                *(request.own_interface or "-", srun.program(), "--label", "--kill-on-bad-exit=1"),
                *(f"--ntasks={request.num_ranks}", f"--nodes={len(placed)}", request.rank_command),
            ),
            {"PATH": programs_path()},
            tag=LABEL,
        )


def start_in_allocation(mpi: Mpi, request: LaunchRequest) -> Start:
    """Return the start of ranks of the MPI controller, by mpirun or by srun (``launch.slurm.mpi``)."""
    wanted = request.job.launch.settings(Slurm).mpi
    has_mpirun = shutil.which("mpirun", path=str(mpi.programs)) is not None
    if wanted == "mpirun" or (wanted == "auto" and has_mpirun):
        return start_of(mpi, request, None)
    return with_environment(mpi, srun.start(mpi, request))


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, from the compressed form of Slurm.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
