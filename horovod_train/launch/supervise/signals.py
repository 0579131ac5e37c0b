"""Termination of a run: ranks are requested to save and exit, then remaining processes are killed.

    execute               executes a launch command: its output, and the end of all its descendants
    guarded               kills the run if this process is killed
    handling_signals, deferred_signals, interrupted_by_signals
                          handlers of the signals that end a run
    Stopper, RunControl   end the ranks after a signal, or end those of one attempt

``horovod_train/system/processes.py`` defines the meaning of signals. Launchers are not used for this:
mpirun kills its ranks one second after SIGTERM, horovodrun five seconds after it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic, sleep
from types import FrameType

import psutil

from horovod_train.errors import LaunchError
from horovod_train.events.wire import lines_of_ranks, with_standard_tags
from horovod_train.launch.base import LaunchPlan
from horovod_train.launch.hosts.agent import RUN_VARIABLE
from horovod_train.launch.hosts.host_group import HostGroup
from horovod_train.launch.jobs import StateFile
from horovod_train.launch.supervise.follow import Frozen
from horovod_train.system.processes import (
    DRAIN_SIGNALS,
    KILLS_AT_ONCE,
    LAUNCH_SIGNALS,
    SIGNAL_TO_RANKS,
    STAY_IGNORED,
    TIMED_STOP_SIGNALS,
)

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


RETRY_INTERVAL_S = 1.0

LEAVING = "its ranks were requested to save and exit after their step"


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for every signal that ends a run while the block runs; main thread only.

    Signals that ``nohup`` or a shell has set to be ignored remain ignored.
    """
    handled = [
        number
        for number in LAUNCH_SIGNALS
        if not (number in STAY_IGNORED and signal.getsignal(number) is signal.SIG_IGN)
    ]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def signal_listener_thread(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Receive every signal that ends a run in a separate thread while the block runs; main thread only.

    Python runs a signal handler in the main thread, after the current call has returned. If a signal arrives
    just before a call blocks, or in another thread, the handler may never run.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while numbers := os.read(reading, 64):  # empty: the write end is closed
            for number in numbers:
                if number in LAUNCH_SIGNALS:
                    on_signal(number)

    thread = Thread(target=listen, daemon=True)
    with handling_signals(lambda *_: None):
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.close(writing)
            thread.join()
            os.close(reading)


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """While the block runs, append signals to the yielded list, unless an inner block handles them."""
    pending_signals: list[int] = []
    with handling_signals(lambda number, _: pending_signals.append(number)):
        yield pending_signals


@contextmanager
def interrupted_by_signals(
    error_of: Callable[[int], BaseException], pending_signals: Sequence[int] = ()
) -> Iterator[None]:
    """Raise ``error_of(number)`` in the block when a signal arrives, or at once for a pending one.

    Not for blocks in which ranks run, because ranks must save before the run ends.
    """

    def interrupt(number: int, _frame: FrameType | None = None) -> None:
        raise error_of(number)

    with handling_signals(interrupt):
        if pending_signals:
            interrupt(pending_signals[0])
        yield


class TerminationRequested(BaseException):
    """A signal that ends a run, as an exception."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.is_drain = number in DRAIN_SIGNALS  # ranks have no time limit to save


class Stopper:
    """Handler of signals to this process, which requests ranks to save and exit, then kills the run.

    Args:
        request_stop: Requests all ranks to save and exit.
        kill: Kills all processes of the run.
        grace_s: Time between the two, in seconds.
    """

    def __init__(
        self, request_stop: Callable[[], object], kill: Callable[[], object], grace_s: float
    ) -> None:
        self.received: int | None = None
        """First SIGTERM, SIGINT or SIGHUP, if one has arrived; else the last drain signal; else None."""
        self._request_stop = request_stop
        self._kill = kill
        self._grace_s = grace_s
        self._deadline_s = float("inf")
        self._wake = Event()
        self._is_over = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals while the block runs; main thread only."""
        worker = Thread(target=self._work)
        with signal_listener_thread(self._on_signal):
            worker.start()
            try:
                yield
            finally:
                self._is_over = True
                self._wake.set()
                worker.join()

    def drain(self) -> None:
        """Request the ranks to save and exit, without a time limit. Thread-safe."""
        self._wake.set()

    def stop(self) -> None:
        """Kill all processes of the run immediately. Thread-safe."""
        self._deadline_s = 0.0
        self._wake.set()

    def _on_signal(self, number: int) -> None:
        if number in TIMED_STOP_SIGNALS:
            if self._deadline_s == float("inf"):
                self._deadline_s = monotonic() + self._grace_s
            elif number in KILLS_AT_ONCE:
                self._deadline_s = 0.0
        if self.received is None or self.received in DRAIN_SIGNALS:
            self.received = number
        self._wake.set()

    def _work(self) -> None:
        self._wake.wait()
        while not self._is_over:
            self._wake.clear()
            if monotonic() >= self._deadline_s:
                self._kill()
            else:
                # Repeated, because a rank that has just started does not handle signals yet.
                self._request_stop()
            self._wake.wait(min(RETRY_INTERVAL_S, max(0.05, self._deadline_s - monotonic())))


class RunControl:
    """Ends the ranks of one attempt, but not the process ``guard``, and records the reason.

    Attributes:
        stopper: Handler of signals.
        lost: Host that stopped responding, and the evidence; None: all hosts respond.
        frozen: Ranks without heartbeat, because of which the attempt was ended.
    """

    def __init__(self, hosts: HostGroup, state: StateFile, guard: int, grace_s: float) -> None:
        self._hosts = hosts
        self._state = state
        self._guard = guard
        self.stopper = Stopper(self._request_stop, self._kill, grace_s)
        self.lost: tuple[str, str] | None = None
        self.frozen: list[Frozen] = []

    @property
    def has_killed_ranks(self) -> bool:
        """Whether the ranks were ended because of a lost host or frozen ranks."""
        return self.lost is not None or bool(self.frozen)

    def examine_hosts(self, timeout_s: float) -> dict[int, int]:
        """After a failure, record a host that does not respond; return the ranks of the others by PID."""
        if not self.has_killed_ranks and (host := self._hosts.silent(timeout_s)):
            self.lost = (host, "it is silent")
        return self._hosts.ranks_by_pid()

    def abort_lost_host(self, host: str, why: str) -> None:
        """End the ranks because a host has stopped responding. Thread-safe."""
        self.lost = self.lost or (host, why)
        self.stopper.stop()

    def abort_frozen_ranks(self, ranks: Sequence[Frozen]) -> None:
        """End the ranks because some have no heartbeat. Thread-safe."""
        self.frozen.extend(ranks)
        self.stopper.stop()

    def _request_stop(self) -> None:
        self._state.write("stopping", message=LEAVING)
        self._hosts.signal_ranks(SIGNAL_TO_RANKS)

    def _kill(self) -> None:
        self._hosts.kill()
        kill_descendants(keep={self._guard, *self._hosts.pids})
