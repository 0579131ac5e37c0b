"""Identity of processes across hosts, containers and reuse of process IDs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def boot_id() -> str:
    """Return the ID of the current boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot; None: there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def cpu_wait_s(pid: int) -> float:
    """Return the time that a process's main thread waited on a run queue, in seconds; 0: not available.

    Source: second field of /proc/<pid>/schedstat, see Documentation/scheduler/sched-stats.rst of Linux.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def own_identity() -> list[str | int | None]:
    """Return a unique, JSON-serializable identity of this process: boot, PID namespace, PID, start time."""
    return [*_place(), os.getpid(), start_ticks(os.getpid())]


def kill(identity: Sequence[str | int | None]) -> bool:
    """Kill another process of this host, given its ``own_identity``; return whether it was killed."""
    *place, pid, ticks = identity
    if not isinstance(pid, int) or pid == os.getpid() or place != _place() or ticks != start_ticks(pid):
        return False
    with suppress(OSError):  # owned by another user, or already ended
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _place() -> list[str]:
    """Return the boot ID and the PID namespace in which this process's PID is valid."""
    return [boot_id(), str(Path("/proc/self/ns/pid").readlink())]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat, from the state on; empty: there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the preceding name may contain spaces and parentheses
