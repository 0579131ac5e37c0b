"""Host lists and hostfiles: the hosts of a job, their numbers of ranks, and their network interfaces.

    Host, hosts_of               a host, and the hosts of a job
    read_hostfile, parse_hosts   hosts in a hostfile, and in a list of hosts
    choose, Chosen               the network interface of ranks on a host

In a hostfile, a host without ``slots`` has one slot.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from horovod_train.checks.hosts import HostFacts, addresses_by_interface, source_towards
from horovod_train.config.launch import HostSettings, Launch
from horovod_train.config.rules import LOCAL_HOSTS
from horovod_train.errors import LostError, UserError, did_you_mean

# "node01", "node01:8" and "node01 slots=8": the formats of horovodrun, mpirun and the MPI operator.
_HOSTFILE_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::(\d+))?((?:\s+[\w-]+\s*=\s*\d+)*)")
# Formats of other tools, which are errors, and their hints.
_OTHER_FORMS = {
    r"\S+@.*": "leave the user out, and give it to ssh (User in ~/.ssh/config)",
    r".*\[.*\].*": "list each host: scontrol show hostnames 'node[01-04]' prints them",
    r".*:.*:.*": "give the host a name or an IPv4 address",
}


@dataclass(frozen=True)
class Host:
    """One host of a job, with its number of ranks and the settings that differ on it."""

    name: str
    num_ranks: int
    is_local: bool = False
    settings: HostSettings = field(default_factory=HostSettings)


def hosts_of(launch: Launch) -> list[Host]:
    """Return the hosts of a job, filled with ranks in order; this machine, if the job lists no hosts."""
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
    """Return the names and addresses by which a host list may refer to this machine."""
    full = socket.gethostname()
    addresses = {found.address for entries in psutil.net_if_addrs().values() for found in entries}
    # Slurm may use a different name for a node.
    return {*LOCAL_HOSTS, full, full.partition(".")[0], os.environ.get("SLURMD_NODENAME", full), *addresses}


def interface_towards(launch: Launch) -> str | None:
    """Return this machine's interface on the route to the first other host; None: no such host or route."""
    others = [host.name for host in hosts_of(launch) if not host.is_local]
    if not others:
        return None
    address = source_towards(others[0])
    return next((name for name, found in addresses_by_interface().items() if address in found), None)


def read_hostfile(path: Path) -> list[str]:
    """Return the hosts of a hostfile as ``host:slots``; a host without slots has one.

    Raises:
        UserError: The file cannot be read, contains no host, or contains a line that is not a host.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"hostfile {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    hosts = parse_hosts(text, f"hostfile {path}", default_slots=1)
    if not hosts:
        raise UserError(f"hostfile {path} names no host")
    return _merge_repeated_hosts(hosts)


def _merge_repeated_hosts(hosts: Sequence[str]) -> list[str]:
    """Add up the slots of repeated hosts: a PBS node file lists a host once for each of its slots."""
    times = Counter(hosts)
    return [
        f"{entry.removesuffix(':1')}:{times[entry]}" if entry.endswith(":1") else entry
        for number, entry in enumerate(hosts)
        if not entry.endswith(":1") or entry not in hosts[:number]
    ]


def parse_hosts(text: str, source: str, default_slots: int) -> list[str]:
    """Parse a list of hosts, one on each line, and return them as ``host:slots``.

    Args:
        text: Lines such as ``node01 slots=4``, ``node01:4`` and ``node01``; ``#`` begins a comment.
        source: Name of the text in error messages.
        default_slots: Number of slots of a host without slots.

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
        if slots:  # 0 slots exclude a host
            hosts.append(f"{found[1]}:{slots}")
    return hosts


def as_argument(hosts: Sequence[Host]) -> str:
    """Return the hosts as an argument of ``-H`` of horovodrun and mpirun."""
    return ",".join(f"{host.name}:{host.num_ranks}" for host in hosts)


@dataclass(frozen=True)
class Chosen:
    """Network interface of a host: its name, its IPv4 address, and the reason for the choice."""

    name: str
    address: str
    reason: str


def choose(host: Host, wanted: str | None, description: HostFacts, others: Sequence[str]) -> Chosen:
    """Return the network interface that ranks on a host use.

    It is the requested one, or that of ssh or of the route to other hosts. Each library reads only its own
    variables for it, so that they are set for all of them.

    Args:
        host: The host.
        wanted: ``launch.network_interface`` of the job.
        description: Result of ``HostActions.describe`` on the host.
        others: Addresses at which other hosts were reached, to determine the route from this machine.

    Raises:
        LostError: The requested interface is not usable, or no interface could be determined.
    """
    usable = {name: found for name, found in description.addresses.items() if found}
    requested = host.settings.network_interface or wanted
    if requested is not None:
        if requested not in usable:
            listed = ", ".join(f"{name} ({found[0]})" for name, found in usable.items()) or "none"
            raise LostError(
                f"{host.name}: no network interface {requested!r} is up and has an IPv4 address; "
                f"those that have: {listed}",
                hint=did_you_mean(requested, usable) or _SET.format(host=host.name),
                hosts=[host.name],
            )
        return Chosen(requested, usable[requested][0], "asked for")
    candidates = [(way, f"the way to {other}") for other, way in description.ways.items()]
    # On this machine, ``ssh_address`` belongs to the ssh session of the user.
    if description.ssh_address and not host.is_local:
        candidates.insert(0, (description.ssh_address, "ssh came in through it"))
    elif host.is_local:
        candidates += [(way, f"the way to {other}") for other in others if (way := source_towards(other))]
    for address, reason in candidates:
        for name, found in usable.items():
            if address in found:
                return Chosen(name, address, reason)
    raise LostError(
        f"{host.name}: cannot determine the network interface to the other hosts",
        hint=_SET.format(host=host.name),
        hosts=[host.name],
    )


_SET = "set launch.network_interface, or launch.host_settings.{host}.network_interface"
