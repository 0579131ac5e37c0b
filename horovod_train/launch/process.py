"""Start a command, follow its output, and leave nobody behind."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Thread

import psutil

from horovod_train.launch.base import LaunchPlan

KILL_TIMEOUT_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# Becomes the command; gets SIGTERM when this process dies, also by kill -9.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def execute(
    plan: LaunchPlan, environ: Mapping[str, str], on_line: Callable[[str], None], keep: Collection[int]
) -> int:
    """Run a plan's command to its end; return its exit code, 128 + n when signal n ended it.

    When the command has ended, whatever is left of its processes is killed.

    Args:
        plan: What to run.
        environ: Environment to which the plan's variables are added.
        on_line: Called with each line of output, standard error included.
        keep: Children of this process that are not the command's.
    """
    starter = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    process = subprocess.Popen(
        [*starter, *plan.argv],
        env={**environ, **plan.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    # Not only for the output to end: something a rank has started may hold it open.
    reaper = Thread(target=_clear_up_after, args=(process, keep))
    reaper.start()
    try:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                on_line(line.rstrip("\n"))
    finally:
        kill_descendants(keep)
        reaper.join()
    code = process.returncode
    return code if code >= 0 else 128 - code


def _clear_up_after(process: subprocess.Popen[str], keep: Collection[int]) -> None:
    """Wait for a command to end, then kill what it left behind."""
    process.wait()
    kill_descendants(keep)


def kill_descendants(keep: Collection[int] = ()) -> None:
    """Kill every process this one has started, or inherited from one it started.

    Args:
        keep: Children to be spared, and what they have started.
    """
    left = []
    for child in psutil.Process().children():
        if child.pid not in keep:
            with suppress(psutil.NoSuchProcess):
                left += [*child.children(recursive=True), child]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=KILL_TIMEOUT_S)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Processes whose parent dies become children of this one: then they can be found."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
