"""Collection of the events of ranks, from all hosts, while the ranks run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event

from horovod_train.launch.hosts.host_group import HostGroup
from horovod_train.system.threads import background_thread

INTERVAL_S = 0.1
INTERVAL_PER_HOST_S = 0.005


def fetching_events(hosts: HostGroup, handle: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call ``handle`` with each new event of ranks, as a line, while the block runs and once after it."""
    interval_s = INTERVAL_S + INTERVAL_PER_HOST_S * len(hosts.connections)

    def fetch(over: Event) -> None:
        is_last = False
        while not is_last:
            is_last = over.wait(interval_s)
            while lines := hosts.new_events():
                for line in lines:
                    handle(line)

    return background_thread(fetch)
