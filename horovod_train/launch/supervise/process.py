"""Execution of a launch command: its output, and the end of all its descendants."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Thread
from time import monotonic, sleep

import psutil

from horovod_train.errors import LaunchError
from horovod_train.events.wire import lines_of_ranks, with_standard_tags
from horovod_train.launch.base import LaunchPlan
from horovod_train.launch.hosts.agent import RUN_VARIABLE

KILL_TIMEOUT_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# When the launcher has exited, also by SIGKILL: kill the marked processes of the run, and remove its files.
# A shell, because it starts fast.
_GUARD = """
trap '' USR1 USR2  # batch systems notify all processes of a job
read -r _
last=x
for round in 1 2 3 4 5 6 7 8 9 10; do
  found=$(grep -lzxF "$1=$2" /proc/[0-9]*/environ 2> /dev/null)  # fails where one has just ended
  [ -n "$found$last" ] || break  # twice: a process that turns into another program shows no environment
  last=$found
  for file in $found; do pid=${file#/proc/}; kill -9 "${pid%/environ}" 2> /dev/null; done
  sleep 0.1
done
rm -rf "$2"
"""


@contextmanager
def guarded(stage: str) -> Iterator[int]:
    """Start a guard, which kills the run if this process is killed while the block runs; yield its PID."""
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", RUN_VARIABLE, stage],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield guard.pid
    finally:
        guard.kill()
        guard.wait()
        assert guard.stdin is not None
        guard.stdin.close()


def execute(
    plan: LaunchPlan, environ: Mapping[str, str], on_line: Callable[[str], None], keep: Collection[int]
) -> int:
    """Run a plan's command until it exits; return its exit code, or 128 + n if signal n ended it.

    When the command has exited, its remaining processes are killed.

    Args:
        plan: Command and environment variables.
        environ: Environment to which the plan's variables are added.
        on_line: Called with each line of a rank or of the command, including standard error.
        keep: PIDs of children of this process that do not belong to the command.

    Raises:
        LaunchError: The command cannot be started.
    """
    try:
        process = subprocess.Popen(
            plan.argv,
            env={**environ, **plan.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {plan.argv[0]}: {error.strerror}") from error
    # The end of the output is not sufficient: a process that a rank has started may keep it open.
    reaper = Thread(target=_clear_up_after, args=(process, keep))
    reaper.start()
    try:
        assert process.stdout is not None
        with process.stdout as output:
            for line in lines_of_ranks(with_standard_tags(output, plan.tag)):
                on_line(line)
    finally:
        kill_descendants(keep)
        reaper.join()
    code = process.returncode
    return code if code >= 0 else 128 - code


def _clear_up_after(process: subprocess.Popen[str], keep: Collection[int]) -> None:
    """Wait until a command has exited, then kill its remaining processes."""
    process.wait()
    kill_descendants(keep)


def kill_descendants(keep: Collection[int] = ()) -> None:
    """Kill all descendants of this process, except the children in ``keep`` and their descendants."""
    deadline_s = monotonic() + KILL_TIMEOUT_S
    # Repeated, because a process may have started another one before it was killed.
    while (left := _living_descendants(keep)) and monotonic() < deadline_s:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        sleep(0.01)


def _living_descendants(keep: Collection[int]) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        if child.pid not in keep:
            with suppress(psutil.NoSuchProcess):
                found += [*child.children(recursive=True), child]
    return [process for process in found if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    # Not psutil.wait_procs: it would reap a process whose exit code another thread waits for.
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of orphaned descendants, so that it can find them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        # As PID 1 of a container, this process would otherwise accumulate zombies.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
