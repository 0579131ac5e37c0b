"""Which hosts take part, with how many ranks each."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from horovod_train.config.rules import LOCAL_HOSTS
from horovod_train.config.schema import HostSettings, Launch
from horovod_train.errors import UserError

# "node01", "node01:8" and "node01 slots=8": what horovodrun, mpirun and the MPI operator write.
_HOSTFILE_LINE = re.compile(r"([A-Za-z0-9.-]+)(?::(\d+))?((?:\s+[\w-]+=\d+)*)")


@dataclass(frozen=True)
class Host:
    """One host of a job.

    Attributes:
        name: Name or address.
        num_ranks: Ranks that run there.
        is_here: Whether it is this machine.
        settings: What is different there.
    """

    name: str
    num_ranks: int
    is_here: bool = False
    settings: HostSettings = field(default_factory=HostSettings)


def hosts_of(launch: Launch) -> list[Host]:
    """Return the hosts that get ranks, filled in order; one, this machine, when none are named."""
    num_ranks = launch.num_ranks or 1
    hosts, own = [], own_names()
    for entry in launch.hosts or [f"localhost:{num_ranks}"]:
        name, _, slots = entry.rpartition(":")
        here = min(int(slots), num_ranks)
        num_ranks -= here
        if here:
            settings = launch.host_settings.get(name, HostSettings())
            hosts.append(Host(name, here, name in own, settings))
    return hosts


def own_names() -> set[str]:
    """Return the names under which this machine may stand in a list of hosts."""
    full = socket.gethostname()
    addresses = {found.address for entries in psutil.net_if_addrs().values() for found in entries}
    # Slurm may know a node by another name than it has.
    return {*LOCAL_HOSTS, full, full.partition(".")[0], os.environ.get("SLURMD_NODENAME", full), *addresses}


def read_hostfile(path: Path) -> list[str]:
    """Return the hosts of a hostfile as ``host:slots``; a host without slots has one.

    Raises:
        UserError: It cannot be read, a line is not a host, or there is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"hostfile {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _HOSTFILE_LINE.fullmatch(text)
        if found is None:
            raise UserError(
                f"hostfile {path}, line {number}: {text!r} is not a host",
                hint="write 'node01 slots=4' or 'node01:4' on each line",
            )
        settings = dict(setting.split("=") for setting in found[3].split())
        hosts.append(f"{found[1]}:{settings.get('slots') or found[2] or 1}")
    if not hosts:
        raise UserError(f"hostfile {path} names no host")
    return hosts


def as_argument(hosts: Sequence[Host]) -> str:
    """Return the hosts as ``-H`` of horovodrun and mpirun wants them."""
    return ",".join(f"{host.name}:{host.num_ranks}" for host in hosts)
