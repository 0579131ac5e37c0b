"""srun, which starts the ranks of an MPI library as Slurm tasks, without a process manager of MPI.

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
"""

from __future__ import annotations

import re

from horovod_train.errors import LaunchError
from horovod_train.horovod.mpi import Mpi
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.commands import call, find_program
from horovod_train.launch.launchers.slurm import Slurm
from horovod_train.launch.mpi.start import LABEL, ON_A_NODE, Start

AUTOMATIC = {"auto", "srun"}
"""Values of ``launch.slurm.mpi`` for which the interface is chosen here."""


def start(mpi: Mpi, request: LaunchRequest) -> Start:
    """Return a start by srun in an allocation.

    Raises:
        LaunchError: Slurm and the MPI library have no interface in common.
    """
    wanted = request.job.launch.settings(Slurm).mpi
    interface = choose(mpi, offered()) if wanted in AUTOMATIC else wanted
    argv = [
        *(program(), f"--mpi={interface}", "--label", "--kill-on-bad-exit=1"),
        *(f"--ntasks={request.num_ranks}", f"--nodes={len(request.hosts)}", "--cpu-bind=none"),
    ]
    return Start(argv, tag=LABEL)


def program() -> str:
    """Return the path of srun."""
    return find_program("srun", hint=ON_A_NODE)


def choose(mpi: Mpi, plugins: list[str]) -> str:
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


def offered() -> list[str]:
    """Return the plugins that ``srun --mpi=list`` prints.

    Raises:
        LaunchError: srun is not installed, does not respond, or fails.
    """
    # Old versions of Slurm print them to standard error.
    return plugins_in(call(program(), "--mpi=list", hint="check slurmctld", with_errors=True))


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
