"""Gloo rendezvous server for ranks that a launcher without support for Horovod (``srun``) starts.

    python -m horovod_train.horovod.rendezvous HOST:RANKS,... INTERFACE srun --label ... PROGRAM

As horovodrun does, it serves the rendezvous while the command runs. The ranks derive their numbers from
Slurm's variables (``environment.from_slurm``).
"""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer


def main(placed: str, interface: str, command: list[str]) -> int:
    """Run the command with a rendezvous server; return its exit code."""
    hosts = parse_hosts(placed)
    assignments = get_host_assignments(hosts, sum(host.slots for host in hosts))
    server = RendezvousServer(verbose=0)
    port = server.start(address=address_of(interface))
    server.init(assignments)
    environment = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address_of(interface),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_TRAIN_PLACEMENT": placed,
    }
    try:
        return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode
    finally:
        server.stop()


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface; of the loopback if the interface has none (or is ``-``)."""
    for found in psutil.net_if_addrs().get(interface, []):
        if found.family.name == "AF_INET":
            return found.address
    return "127.0.0.1"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
