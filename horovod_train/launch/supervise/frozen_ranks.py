"""Detection of frozen ranks (stopped, swapping, blocked in a file system) by their hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Event

from horovod_train.config.schema import Health
from horovod_train.launch.hosts.host_group import HostGroup
from horovod_train.system.threads import background_thread

POLL_INTERVAL_S = 1.0
# Ranks send two heartbeats per second, which may be delayed.
MIN_SILENCE_S = 2.0
# Hints by the state of a process.
HINTS = {
    "stopped": "its process is stopped (SIGSTOP): `kill -CONT {pid}` on {host} continues it",
    "tracing-stop": "a debugger holds it: detach it from process {pid} on {host}",
    "sleeping": "a library that holds the GIL waits: `py-spy dump --native --pid {pid}` on {host} "
    "shows where",
    "disk-sleep": "it waits for a disk or a network file system of {host}: is that up? see `dmesg` there",
}
OTHER_HINT = "is {host} out of memory, so that it swaps? see `dmesg` and `vmstat 1` there"


@dataclass(frozen=True)
class Frozen:
    """A rank without heartbeat and CPU activity for ``silent_s``; ``doing`` is the state of its process."""

    rank: int
    host: str
    pid: int
    silent_s: float
    doing: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid}, {self.doing}) shows no sign of life"

    @property
    def hint(self) -> str:
        """Hint for the user."""
        return HINTS.get(self.doing, OTHER_HINT).format(pid=self.pid, host=self.host)


def find_frozen(hosts: HostGroup, limit_s: float) -> list[Frozen]:
    """Return the ranks without heartbeat and CPU activity for at least ``limit_s``, sorted by rank."""
    silent = hosts.unresponsive_ranks(limit_s)
    found = [
        Frozen(each.rank, host, each.pid, each.silent_s, each.doing)
        for host, ranks in silent.items()
        for each in ranks
    ]
    return sorted(found, key=lambda each: each.rank)


def watching_ranks(
    hosts: HostGroup,
    health: Health,
    report: Callable[[str], None],
    abort_frozen_ranks: Callable[[Sequence[Frozen]], None],
) -> AbstractContextManager[None]:
    """Check the ranks of all hosts once a second while the block runs.

    Args:
        hosts: Hosts of the attempt.
        health: Time limits for the warning and for the end of the ranks.
        report: Called with the frozen ranks when they change; with an empty text when all ranks respond.
        abort_frozen_ranks: Called once, with the ranks that are frozen for ``stall_shutdown_s``.
    """
    warning_s = max(health.stall_warning_s, MIN_SILENCE_S)
    shutdown_s = max(health.stall_shutdown_s, 2 * MIN_SILENCE_S)

    def look(over: Event) -> None:
        last_text = ""
        while not over.wait(POLL_INTERVAL_S):
            frozen = find_frozen(hosts, warning_s)
            text = "; ".join(map(str, frozen))
            if text != last_text:
                report(last_text := text)
            if lost := [each for each in frozen if each.silent_s >= shutdown_s]:
                abort_frozen_ranks(lost)
                return

    return background_thread(look)
