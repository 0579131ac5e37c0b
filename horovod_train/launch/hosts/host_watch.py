"""Notices a host that stops answering, and says why that is thought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING

from horovod_train.launch.hosts.agent import HostActions

if TYPE_CHECKING:
    from horovod_train.launch.hosts.host_group import RemoteHost

PING_INTERVAL_S = 2.0


def look_at_hosts(
    hosts: Sequence[RemoteHost], timeout_s: float, on_lost: Callable[[str, str], None], over: Event
) -> None:
    """Ask hosts again and again whether they are there; the first that is not is given up.

    Args:
        hosts: Which ones.
        timeout_s: One that says nothing for so long is lost, in seconds.
        on_lost: Gets its name, and why it is taken for lost.
        over: Set to stop watching.
    """
    looked_s, stood_still_s = monotonic(), 0.0
    while not over.wait(PING_INTERVAL_S):
        now_s = monotonic()
        if (gap_s := now_s - looked_s - PING_INTERVAL_S) > timeout_s / 2:
            # This process was stopped itself. An agent that has heard nothing for too long has ended its
            # ranks; one that has not is to be asked first.
            stood_still_s = gap_s
            for host in hosts:
                host.last_answer_s = now_s
        looked_s = now_s
        for host in hosts:
            silent_s, is_cut = monotonic() - host.last_answer_s, host.is_cut
            if is_cut or silent_s > timeout_s:
                host.abandon()
                on_lost(host.host.name, _why_lost(silent_s, stood_still_s, is_cut=is_cut))
                return
            host.submit(HostActions.ping)


def _why_lost(silent_s: float, stood_still_s: float, *, is_cut: bool) -> str:
    """Return why a host is taken for lost, as a clause.

    Args:
        silent_s: How long ago it was heard, in seconds.
        stood_still_s: For how long this process was stopped before, in seconds.
        is_cut: The connection to it has ended.
    """
    if not is_cut:
        return f"silent for {silent_s:.0f} s"
    if stood_still_s:
        return f"this launcher was stopped for {stood_still_s:.0f} s, and the host has ended its ranks"
    return "its ssh connection ended"
