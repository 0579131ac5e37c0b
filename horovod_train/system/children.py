"""Termination of child processes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil


def end_children() -> None:
    """Terminate child processes, because mpirun waits for all processes that have this rank's output open."""
    children = [
        child for child in psutil.Process().children(recursive=True) if not _is_helper(_command_of(child))
    ]
    for signal_to in (psutil.Process.terminate, psutil.Process.kill):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                signal_to(child)
        _, children = psutil.wait_procs(children, timeout=2)


def _is_helper(command: list[str]) -> bool:
    """Return whether a process belongs to Python or Open MPI, and exits after this process on its own."""
    return "multiprocessing.resource_tracker" in " ".join(command) or Path(*command[:1]).name == "orted"


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
