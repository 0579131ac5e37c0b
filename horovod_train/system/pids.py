"""A process is more than its number, which another one may have later, or on another machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def boot_id() -> str:
    """Return what this start of the machine is called, whatever its clock says."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None: there is none of this number."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number that is more than an entry in its parent's books."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def cpu_wait_s(pid: int) -> float:
    """Return how long a process's main thread could have run and others did; 0: the system does not tell.

    Source: "schedstat" in Documentation/scheduler/sched-stats.rst of Linux, its second number.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def own_identity() -> list[str | int | None]:
    """Return what tells this process from all others, for JSON: machine, container, number, start."""
    return [*_place(), os.getpid(), start_ticks(os.getpid())]


def kill(identity: Sequence[str | int | None]) -> bool:
    """Kill another process, if it is on this machine and may be killed.

    Args:
        identity: What ``own_identity`` returned there.

    Returns:
        Whether that was done.
    """
    *place, pid, ticks = identity
    if not isinstance(pid, int) or pid == os.getpid() or place != _place() or ticks != start_ticks(pid):
        return False
    with suppress(OSError):  # of another user, or just ended
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _place() -> list[str]:
    """Return the machine and the container in which numbers of processes mean what they mean here."""
    return [boot_id(), str(Path("/proc/self/ns/pid").readlink())]


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5)'s stat from the state on; empty: no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before it may have spaces and brackets
