"""The processes that this one has started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil


def end_children() -> None:
    """End the child processes of this rank: mpirun waits for all processes with a rank's output."""
    children = [
        child for child in psutil.Process().children(recursive=True) if not _is_helper(_command_of(child))
    ]
    for signal_to in (psutil.Process.terminate, psutil.Process.kill):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                signal_to(child)
        _, children = psutil.wait_procs(children, timeout=2)


def _is_helper(command: list[str]) -> bool:
    """Whether it is one of Python or Open MPI, which ends with this process and cleans up after it."""
    return "multiprocessing.resource_tracker" in " ".join(command) or Path(*command[:1]).name == "orted"


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
