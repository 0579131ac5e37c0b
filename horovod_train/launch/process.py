"""Carry out a plan: start the command, follow its output, and leave nobody behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from types import FrameType
from typing import Any

import psutil

from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan

GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Ended:
    """How a plan ended.

    Attributes:
        code: Exit code of its command; 128 + n when signal n ended it.
        stopped_by: The signal that this process got and passed on; None: it ended by itself.
    """

    code: int
    stopped_by: int | None


def execute(plan: LaunchPlan, on_line: Callable[[str], None]) -> Ended:
    """Run a plan to its end.

    SIGINT and SIGTERM are passed on as SIGTERM, so that ranks can end well; after a grace of ten
    seconds, or when the command has ended, whatever is left of its processes is killed.

    Args:
        plan: What to run.
        on_line: Called with each line of output, standard error included.

    Raises:
        LaunchError: The command cannot be started.
    """
    for path, content in plan.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    with _adopt_orphans():
        try:
            process = subprocess.Popen(
                plan.argv,
                env={**os.environ, **plan.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  (no thread runs yet)
            )
        except OSError as error:
            raise LaunchError(f"cannot start {plan.argv[0]}: {error.strerror}") from error
        try:
            with _forward_signals(process) as received:
                # Not only for the output to end: something a rank has started may hold it open.
                reaper = Thread(target=_clear_up_after, args=(process,))
                reaper.start()
                assert process.stdout is not None
                for line in process.stdout:
                    on_line(line.rstrip("\n"))
                reaper.join()
        finally:
            kill_descendants()
        code = process.returncode
    return Ended(code if code >= 0 else 128 - code, received[0] if received else None)


def _clear_up_after(process: subprocess.Popen[str]) -> None:
    """Wait for a command to end, then kill what it left behind."""
    process.wait()
    kill_descendants()


def kill_descendants() -> None:
    """Kill every process this one has started, or inherited from one it started."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=GRACE_S)


def _die_with_parent() -> None:
    """In the child: get SIGTERM when the parent dies, also by kill -9."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _adopt_orphans() -> Iterator[None]:
    """Processes whose parent dies become children of this one: then they can be found."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


@contextmanager
def _forward_signals(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on as SIGTERM; kill when the grace is over or at the second signal."""
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        if received or number == signal.SIGALRM:
            kill_descendants()
            return
        received.append(number)
        process.terminate()
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before: dict[int, Any] = {number: signal.signal(number, stop) for number in handled}
    try:
        yield received
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
