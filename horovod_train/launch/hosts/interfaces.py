"""Which network interface the ranks use: asked for, or the one through which ssh reaches a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod_train.checks.host_facts import HostFacts, source_towards
from horovod_train.errors import LostError, did_you_mean
from horovod_train.launch.hosts.hostlist import Host


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


def choose(host: Host, wanted: str | None, description: HostFacts, others: Sequence[str]) -> Chosen:
    """Return the interface of one host.

    Args:
        host: Which host.
        wanted: The job's ``launch.network_interface``.
        description: What ``HostActions.describe`` said there.
        others: Addresses at which other hosts were reached, for this machine to see the way to them.

    Raises:
        LostError: No such interface, or none could be determined.
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
    # What this process itself was reached through says nothing about the way to the others.
    if description.reached_at and not host.is_local:
        candidates.insert(0, (description.reached_at, "ssh came in through it"))
    elif host.is_local:
        candidates += [(way, f"the way to {other}") for other in others if (way := source_towards(other))]
    for address, reason in candidates:
        for name, found in usable.items():
            if address in found:
                return Chosen(name, address, reason)
    raise LostError(
        f"{host.name}: cannot tell which network interface reaches the other hosts",
        hint=_SET.format(host=host.name),
        hosts=[host.name],
    )


_SET = "set launch.network_interface, or launch.host_settings.{host}.network_interface"
