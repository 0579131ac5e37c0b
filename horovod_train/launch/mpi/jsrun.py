"""jsrun, which starts ranks in allocations of LSF on IBM systems. Not tested on such a system.

=============  ==================================================================================
hosts, slots   one resource set for each rank, on the hosts of the allocation
environment    passed to all ranks; each host also has the environment file of the run
binding        ``--bind none``: ranks bind themselves (``launch.cpu_binding``)
output         ``--stdio_mode prepended``: ``RANK: ``
stdin          none
signals        the agents of the hosts deliver them
daemons        jsmd, a service of the system
=============  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod_train.horovod.mpi import Mpi
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.commands import find_program
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.mpi.start import LABEL, ON_A_NODE, Start


def start(_: Mpi, request: LaunchRequest, _hosts: Sequence[Host] | None) -> Start:
    """Return a start by jsrun."""
    per_host = max(host.num_ranks for host in request.hosts)
    argv = [
        *(find_program("jsrun", hint=ON_A_NODE), "--nrs", str(request.num_ranks), "--tasks_per_rs", "1"),
        *("--rs_per_host", str(per_host), "--bind", "none", "--stdio_mode", "prepended"),
    ]
    return Start(argv, tag=LABEL)
