"""Which hosts take part, with how many ranks each."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from horovod_train.checks.host_facts import addresses_by_interface, source_towards
from horovod_train.config.launch import HostSettings, Launch
from horovod_train.config.rules import LOCAL_HOSTS
from horovod_train.errors import UserError

# "node01", "node01:8" and "node01 slots=8": what horovodrun, mpirun and the MPI operator write.
_HOSTFILE_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::(\d+))?((?:\s+[\w-]+\s*=\s*\d+)*)")
# Fields of other tools, and their replacements.
_OTHER_FORMS = {
    r"\S+@.*": "leave the user out, and give it to ssh (User in ~/.ssh/config)",
    r".*\[.*\].*": "list each host: scontrol show hostnames 'node[01-04]' prints them",
    r".*:.*:.*": "give the host a name or an IPv4 address",
}


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
    is_local: bool = False
    settings: HostSettings = field(default_factory=HostSettings)


def hosts_of(launch: Launch) -> list[Host]:
    """Return the hosts that get ranks, filled in order; one, this machine, when none are named."""
    num_ranks = launch.num_ranks or 1
    hosts, own = [], own_names()
    for entry in launch.hosts or [f"localhost:{num_ranks}"]:
        name, _, slots = entry.rpartition(":")
        num_on_host = min(int(slots), num_ranks)
        num_ranks -= num_on_host
        if num_on_host:
            settings = launch.host_settings.get(name, HostSettings())
            hosts.append(Host(name, num_on_host, name in own, settings))
    return hosts


def own_names() -> set[str]:
    """Return the names under which this machine may stand in a list of hosts."""
    full = socket.gethostname()
    addresses = {found.address for entries in psutil.net_if_addrs().values() for found in entries}
    # Slurm may know a node by another name than it has.
    return {*LOCAL_HOSTS, full, full.partition(".")[0], os.environ.get("SLURMD_NODENAME", full), *addresses}


def interface_towards(launch: Launch) -> str | None:
    """Return this machine's interface on the way to the first other host; None: there is none, or no way."""
    others = [host.name for host in hosts_of(launch) if not host.is_local]
    if not others:
        return None
    address = source_towards(others[0])
    return next((name for name, found in addresses_by_interface().items() if address in found), None)


def read_hostfile(path: Path) -> list[str]:
    """Return the hosts of a hostfile as ``host:slots``; a host without slots has one.

    Raises:
        UserError: It cannot be read, a line is not a host, or there is none.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"hostfile {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    hosts = parse_hosts(text, f"hostfile {path}", default_slots=1)
    if not hosts:
        raise UserError(f"hostfile {path} names no host")
    return _added_up(hosts)


def _added_up(hosts: Sequence[str]) -> list[str]:
    """Return hosts each once: a node file of PBS names a host once for each of its slots."""
    times = Counter(hosts)
    return [
        f"{entry.removesuffix(':1')}:{times[entry]}" if entry.endswith(":1") else entry
        for number, entry in enumerate(hosts)
        if not entry.endswith(":1") or entry not in hosts[:number]
    ]


def parse_hosts(text: str, source: str, default_slots: int) -> list[str]:
    """Return the hosts that are listed in a text, one on each line, as ``host:slots``.

    Args:
        text: Lines such as ``node01 slots=4``, ``node01:4`` and ``node01``; ``#`` begins a comment.
        source: What the text is, for messages.
        default_slots: Slots of a host that is listed without.

    Raises:
        UserError: A line is not a host.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        found = _HOSTFILE_LINE.fullmatch(entry)
        if found is None:
            raise UserError(
                f"{source}, line {number}: {entry!r} is not a host",
                hint=next(
                    (hint for form, hint in _OTHER_FORMS.items() if re.fullmatch(form, entry)),
                    "write 'node01 slots=4' or 'node01:4' on each line",
                ),
            )
        settings = dict(re.findall(r"([\w-]+)\s*=\s*(\d+)", found[3]))
        slots = int(settings.get("slots") or found[2] or default_slots)
        if slots:  # without, the host is not to be used now
            hosts.append(f"{found[1]}:{slots}")
    return hosts


def as_argument(hosts: Sequence[Host]) -> str:
    """Return the hosts as ``-H`` of horovodrun and mpirun wants them."""
    return ",".join(f"{host.name}:{host.num_ranks}" for host in hosts)
