"""PALS, the process manager of Cray MPICH on HPE Cray systems with PBS. Not tested on such a system.

=============  ==================================================================================
hosts, slots   ``--hosts`` and ``--ppn``; the hosts of the allocation if there are none
environment    passed to all ranks; each host also has the environment file of the run
binding        ``--cpu-bind none``: ranks bind themselves (``launch.cpu_binding``)
output         ``--line-buffer``, without a tag: logs of single ranks contain their events only
stdin          rank 0's; the launcher's is /dev/null
signals        the agents of the hosts deliver them
daemons        palsd, a service of the system
=============  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod_train.errors import LaunchError
from horovod_train.horovod.mpi import Mpi
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.commands import find_program
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.mpi.start import ON_A_NODE, Start


def start(_: Mpi, request: LaunchRequest, hosts: Sequence[Host] | None) -> Start:
    """Return a start by PALS.

    Raises:
        LaunchError: The hosts have different numbers of ranks.
    """
    sizes = {host.num_ranks for host in request.hosts}
    if len(sizes) != 1:
        raise LaunchError(
            f"PALS starts the same number of ranks on each host, and these have {sorted(sizes)}",
            hint="request as many ranks on each host",
        )
    argv = [
        *(find_program("mpiexec", hint=ON_A_NODE), "--line-buffer", "-n", str(request.num_ranks)),
        *("--ppn", str(sizes.pop()), "--cpu-bind", "none"),
        *(("--hosts", ",".join(host.name for host in hosts)) if hosts is not None else ()),
    ]
    return Start(argv)
