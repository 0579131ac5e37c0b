"""Which network interface the ranks use: asked for, or the one through which ssh reaches a host."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_train.errors import LaunchError, did_you_mean
from horovod_train.launch.hosts import Host


@dataclass(frozen=True)
class Chosen:
    """An interface of a host.

    Attributes:
        name: Such as ``eth0``.
        address: Its IPv4 address.
        reason: Why this one.
    """

    name: str
    address: str
    reason: str


def choose(host: Host, wanted: str | None, description: Mapping[str, Any], others: Sequence[str]) -> Chosen:
    """Return the interface of one host.

    Args:
        host: Which host.
        wanted: The job's ``launch.network_interface``.
        description: What ``OnHost.describe`` said there.
        others: Addresses of other hosts; the way to one of them decides where ssh did not come in.

    Raises:
        LaunchError: There is no such interface, or none that can be told.
    """
    addresses: Mapping[str, list[str]] = description["addresses"]
    usable = {name: found for name, found in addresses.items() if found}
    asked = host.settings.network_interface or wanted
    if asked is not None:
        if asked not in usable:
            listed = ", ".join(f"{name} ({found[0]})" for name, found in usable.items()) or "none"
            raise LaunchError(
                f"{host.name}: there is no network interface {asked!r} that is up and has an IPv4 address; "
                f"there are {listed}",
                hint=did_you_mean(asked, usable) or _SET.format(host=host.name),
            )
        return Chosen(asked, usable[asked][0], "asked for")
    reached_at = description["reached_at"]
    candidates = [(reached_at, "ssh came in through it")] if reached_at else []
    if host.is_here or not reached_at:
        candidates += [(way, f"the way to {other}") for other in others if (way := source_towards(other))]
    for address, reason in candidates:
        for name, found in usable.items():
            if address in found:
                return Chosen(name, address, reason)
    raise LaunchError(
        f"{host.name}: cannot tell which network interface reaches the other hosts",
        hint=_SET.format(host=host.name),
    )


_SET = "set launch.network_interface, or launch.host_settings.{host}.network_interface"


def source_towards(address: str) -> str:
    """Return the address of this machine from which packets to another one leave; empty: there is no way."""
    try:
        # Nothing is sent: connecting a datagram socket only asks for the route.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source: str = probe.getsockname()[0]
            return source
    except OSError:
        return ""
