"""Launchers of jobs in Slurm.

    SlurmLauncher             submits jobs with ``sbatch``
    SlurmAllocationLauncher   starts ranks on the nodes of this process's allocation
    srun                      start of ranks of an MPI library by srun, without a process manager of MPI
    start_in_allocation       start of ranks of the MPI controller, by mpirun or by srun

``launch.slurm.mpi`` chooses between mpirun and srun.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from horovod_train.errors import LaunchError
from horovod_train.horovod.mpi import Mpi
from horovod_train.horovod.toolchain import programs_path
from horovod_train.launch.base import LaunchPlan, LaunchRequest, call, find_program
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.launchers.batch import SCRIPT, AllocationLauncher, BatchLauncher, BatchStatus, How
from horovod_train.launch.launchers.slurm import SLURM, Slurm
from horovod_train.launch.mpi import LABEL, ON_A_NODE, Start, mpi_of, start_of, with_environment

MAX_ID_CHARS, MAX_PATH_CHARS = 32, 4096

# Job states of Slurm.
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
_ACTIVE = {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_CANCEL = {
    "drain": ("--batch", "--signal=USR2"),
    "stop": ("--batch", "--signal=TERM"),
    "kill": (),
}


class SlurmLauncher(BatchLauncher):
    """Launcher that submits jobs with ``sbatch``."""

    batch_system = SLURM
    id_variable = "SLURM_JOB_ID"

    def submit_command(self, request: LaunchRequest, after: str = "") -> tuple[str, ...]:
        return ("sbatch", "--parsable", str(request.log_dir / SCRIPT))

    def preamble(self, request: LaunchRequest) -> list[str]:
        slurm = request.job.launch.settings(Slurm)
        options = {
            "job-name": request.job.name,
            "ntasks": str(request.num_ranks),
            **({"ntasks-per-node": str(slurm.ranks_per_node)} if slurm.ranks_per_node else {}),
            "output": str(self.script_log(request.log_dir)),
            "open-mode": "append",
            # Only to the script, one grace period before the time limit.
            "signal": f"B:USR1@{max(1, round(request.job.launch.grace_s))}",
            **slurm.options,
        }
        return [
            *(f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items()),
            f"#SBATCH --{'requeue' if slurm.requeue else 'no-requeue'}",
        ]

    def submitted_id(self, script: Path) -> str:
        jobs = self.call(
            *("squeue", f"--user={os.getuid()}", "--states=all", "--noheader"),
            f"--Format=JobID:{MAX_ID_CHARS},Command:{MAX_PATH_CHARS}",
        )
        rows = (line.split(maxsplit=1) for line in jobs.splitlines())
        return next((row[0] for row in rows if row[1:] and row[1].strip() == str(script)), "")

    def query(self, native_id: str) -> BatchStatus | None:
        try:
            found = self.call("scontrol", "show", "job", "--oneliner", native_id)
        except LaunchError as error:
            if "Invalid job id" in error.message:
                return None
            raise
        fields = dict(re.findall(r"(\w+)=(\S*)", found))
        shown = fields.get("JobState", "")
        if shown in _WAITING:
            return BatchStatus("queued", shown, fields.get("Reason", ""))
        if shown == "COMPLETING":
            return BatchStatus("ending", shown)
        if shown in _ACTIVE:
            return BatchStatus("active", shown)
        return BatchStatus("cancelled" if shown.startswith("CANCELLED") else "ended", shown)

    def end(self, native_id: str, how: How, *, is_waiting: bool) -> None:
        self.call("scancel", *(() if is_waiting else _CANCEL[how]), native_id)

    def put_back(self, native_id: str, request: LaunchRequest) -> None:
        """Requeue a job; Slurm terminates this process shortly after."""
        self.call("scontrol", "requeue", native_id)


AUTOMATIC = {"auto", "srun"}
"""Values of ``launch.slurm.mpi`` for which the interface is chosen here."""


def srun(mpi: Mpi, request: LaunchRequest) -> Start:
    """Return a start by srun in an allocation.

    srun starts the ranks of an MPI library as Slurm tasks, without a process manager of MPI.

    =============  ==================================================================================
    hosts, slots   those of the allocation
    environment    passed to all ranks; each host also has the environment file of the run
    binding        ``--cpu-bind=none``: ranks bind themselves (``launch.cpu_binding``)
    output         ``--label``: ``RANK: ``
    stdin          rank 0's; the launcher's is /dev/null
    signals        the agents of the hosts deliver them
    daemons        slurmstepd, which Slurm ends
    interface      ``--mpi``: an interface that both Slurm (``srun --mpi=list``) and the MPI library support
    =============  ==================================================================================

    Raises:
        LaunchError: Slurm and the MPI library have no interface in common.
    """
    wanted = request.job.launch.settings(Slurm).mpi
    interface = interface_of_srun(mpi, interfaces_of_slurm()) if wanted in AUTOMATIC else wanted
    argv = [
        *(srun_program(), f"--mpi={interface}", "--label", "--kill-on-bad-exit=1"),
        *(f"--ntasks={request.num_ranks}", f"--nodes={len(request.hosts)}", "--cpu-bind=none"),
    ]
    return Start(argv, tag=LABEL)


def srun_program() -> str:
    """Return the path of srun."""
    return find_program("srun", hint=ON_A_NODE)


def interface_of_srun(mpi: Mpi, plugins: list[str]) -> str:
    """Return the first interface of an MPI library that Slurm has a plugin for.

    Raises:
        LaunchError: There is none.
    """
    for interface in mpi.interfaces:
        if interface in plugins:
            return interface
    raise LaunchError(
        f"{mpi} supports the interfaces {', '.join(mpi.interfaces) or '(unknown)'}, and `srun --mpi=list` "
        f"prints {', '.join(plugins) or 'none'}",
        hint="use launch.slurm.mpi: mpirun, or an MPI library that was built for this Slurm",
    )


def interfaces_of_slurm() -> list[str]:
    """Return the plugins that ``srun --mpi=list`` prints.

    Raises:
        LaunchError: srun is not installed, does not respond, or fails.
    """
    # Old versions of Slurm print them to standard error.
    return plugins_in(call(srun_program(), "--mpi=list", hint="check slurmctld", with_errors=True))


def plugins_in(text: str) -> list[str]:
    r"""Return the plugins in the output of ``srun --mpi=list``, of old and current versions of Slurm.

    >>> plugins_in("MPI plugin types are...\n\tpmix\n\tnone\nspecific pmix plugin versions: pmix_v4\n")
    ['pmix', 'none', 'pmix_v4']
    >>> plugins_in("srun: MPI types are...\nsrun: pmi2\nsrun: none\n")
    ['pmi2', 'none']
    """
    found = re.findall(r"^(?:srun: |\s+)?(\w+)\s*$", text, re.MULTILINE)
    for listed in re.findall(r"versions?[^:\n]*: *([\w, ]+)$", text, re.MULTILINE):
        found += re.findall(r"\w+", listed)
    return list(dict.fromkeys(found))


class SlurmAllocationLauncher(AllocationLauncher):
    """Launcher that starts ranks in a Slurm allocation. Slurm sends SIGUSR1 before its time limit.

    The allocation is that of this process (``sbatch`` or ``salloc``).

    controller: mpi     mpirun, which starts its daemons through Slurm, or srun --mpi (launch.slurm.mpi)
    controller: gloo    srun, with a Slurm task for each rank
    """

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
        if request.job.launch.controller == "mpi":
            return start_in_allocation(mpi_of(request), request).plan(request)
        placed = [f"{host.name}:{host.num_ranks}" for host in request.hosts]
        return LaunchPlan(
            (
                *(sys.executable, "-P", "-m", "horovod_train.horovod.rendezvous", ",".join(placed)),
                *(request.own_interface or "-", srun_program(), "--label", "--kill-on-bad-exit=1"),
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
    return with_environment(mpi, srun(mpi, request))


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, from the compressed form of Slurm.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
