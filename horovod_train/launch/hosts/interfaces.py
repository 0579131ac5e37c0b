"""Network interface of ranks on a host: the requested one, or that of ssh or of the route to other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod_train.checks.host_facts import HostFacts, source_towards
from horovod_train.errors import LostError, did_you_mean
from horovod_train.launch.hosts.hostlist import Host


@dataclass(frozen=True)
class Chosen:
    """Network interface of a host: its name, its IPv4 address, and the reason for the choice."""

    name: str
    address: str
    reason: str


def choose(host: Host, wanted: str | None, description: HostFacts, others: Sequence[str]) -> Chosen:
    """Return the network interface that ranks on a host use.

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
