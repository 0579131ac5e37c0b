"""Detection of hosts that stop responding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING

from horovod_train.launch.hosts.agent import HostActions

if TYPE_CHECKING:
    from horovod_train.launch.hosts.host_group import RemoteHost

PING_INTERVAL_S = 2.0


def ping_hosts(
    hosts: Sequence[RemoteHost], timeout_s: float, on_lost: Callable[[str, str], None], over: Event
) -> None:
    """Ping hosts until ``over`` is set, or until one is lost: abandon it, and call ``on_lost(name, reason)``.

    A host is lost when its connection has ended, or after ``timeout_s`` without a response.
    """
    looked_s, stood_still_s = monotonic(), 0.0
    while not over.wait(PING_INTERVAL_S):
        now_s = monotonic()
        if (gap_s := now_s - looked_s - PING_INTERVAL_S) > timeout_s / 2:
            # This process was stopped, and received no responses. Ping all hosts before one counts as lost.
            stood_still_s = gap_s
            for host in hosts:
                host.last_answer_s = now_s
        looked_s = now_s
        for host in hosts:
            silent_s, is_disconnected = monotonic() - host.last_answer_s, host.is_disconnected
            if is_disconnected or silent_s > timeout_s:
                host.abandon()
                on_lost(host.host.name, _why_lost(silent_s, stood_still_s, is_disconnected=is_disconnected))
                return
            host.submit(HostActions.ping)


def _why_lost(silent_s: float, stood_still_s: float, *, is_disconnected: bool) -> str:
    """Return why a host counts as lost; this process was stopped for ``stood_still_s`` before."""
    if not is_disconnected:
        return f"silent for {silent_s:.0f} s"
    if stood_still_s:
        return f"this launcher was stopped for {stood_still_s:.0f} s, and the host has ended its ranks"
    return "its ssh connection ended"
