"""Ends a run from outside: preempts the ranks first, then kills the remaining processes.

What each signal means is in ``horovod_train/system/signals.py``. Launchers are not relied on for this: mpirun
kills its ranks a second after SIGTERM, horovodrun five seconds after.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from types import FrameType

from horovod_train.launch.hosts.host_group import HostGroup
from horovod_train.launch.jobs import StateFile
from horovod_train.launch.supervise.frozen_ranks import Frozen
from horovod_train.launch.supervise.process import kill_descendants
from horovod_train.system.signals import (
    HURRIED_SIGNALS,
    KILLS_AT_ONCE,
    LAUNCH_SIGNALS,
    PATIENT_SIGNALS,
    SIGNAL_TO_RANKS,
    STAY_IGNORED,
)

RETRY_INTERVAL_S = 1.0

LEAVING = "its ranks were asked to save and leave after their step"


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While the block runs, a handler gets every signal that ends a run; main thread only.

    Signals that ``nohup`` or a shell has set to be ignored stay ignored.
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
    """While the block runs, a separate thread receives every signal that ends a run; main thread only.

    A handler in Python runs in the main thread, and not before that comes back from the call it is in. If a
    signal arrives just before a call blocks, or at another thread, that may be never.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while numbers := os.read(reading, 64):  # nothing: the other end is closed
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
    """While the block runs, unhandled signals are appended to the list that it yields."""
    pending_signals: list[int] = []
    with handling_signals(lambda number, _: pending_signals.append(number)):
        yield pending_signals


@contextmanager
def interrupted_by_signals(
    error_of: Callable[[int], BaseException], pending_signals: Sequence[int] = ()
) -> Iterator[None]:
    """While the block runs, a signal ends it: no rank has been started that would have to save.

    Args:
        error_of: The error to raise, by the number of the signal.
        pending_signals: Signals that arrived before; the first of them ends the block at once.
    """

    def interrupt(number: int, _frame: FrameType | None = None) -> None:
        raise error_of(number)

    with handling_signals(interrupt):
        if pending_signals:
            interrupt(pending_signals[0])
        yield


class TerminationRequested(BaseException):
    """A signal, as something that can be caught.

    Args:
        number: Which one.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.is_patient = number in PATIENT_SIGNALS


class Stopper:
    """Turns signals to this process into an orderly end of the run.

    Args:
        request_stop: Requests all ranks to save and exit.
        kill: Kills all processes of the run.
        grace_s: Time between the two, in seconds.
    """

    def __init__(
        self, request_stop: Callable[[], object], kill: Callable[[], object], grace_s: float
    ) -> None:
        self.received: int | None = None
        """The first signal; None: none came."""
        self._request_stop = request_stop
        self._kill = kill
        self._grace_s = grace_s
        self._deadline_s = float("inf")
        self._wake = Event()
        self._is_over = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Act on signals while the block runs; main thread only."""
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
        """Ask the ranks to save and leave, and wait as long as it takes; from any thread."""
        self._wake.set()

    def stop(self) -> None:
        """Kill everything now; from any thread."""
        self._deadline_s = 0.0
        self._wake.set()

    def _on_signal(self, number: int) -> None:
        if number in HURRIED_SIGNALS:
            if self._deadline_s == float("inf"):
                self._deadline_s = monotonic() + self._grace_s
            elif number in KILLS_AT_ONCE:
                self._deadline_s = 0.0
        if self.received is None or self.received in PATIENT_SIGNALS:
            self.received = number
        self._wake.set()

    def _work(self) -> None:
        self._wake.wait()
        while not self._is_over:
            self._wake.clear()
            if monotonic() >= self._deadline_s:
                self._kill()
            else:
                # Again and again: a rank that has just been started does not listen yet.
                self._request_stop()
            self._wake.wait(min(RETRY_INTERVAL_S, max(0.05, self._deadline_s - monotonic())))


class RunControl:
    """Ends the ranks of one attempt, and records the reason.

    Args:
        hosts: Where they run.
        state: Where to note how the run stands.
        guard: Process that clears up if this one is killed; it is not to be killed.
        grace_s: Time that ranks get to save, in seconds.

    Attributes:
        stopper: Turns signals into an orderly end.
        lost: The host that stopped answering, and why that is thought; None: none did.
        frozen: Ranks that were given up because they showed no sign of life.
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
        """Whether the ranks were ended for a reason that is known."""
        return self.lost is not None or bool(self.frozen)

    def abort_lost_host(self, host: str, why: str) -> None:
        """End the ranks because a host has stopped answering; from any thread."""
        self.lost = self.lost or (host, why)
        self.stopper.stop()

    def abort_frozen_ranks(self, ranks: Sequence[Frozen]) -> None:
        """End the ranks because some have no heartbeat; from any thread."""
        self.frozen.extend(ranks)
        self.stopper.stop()

    def _request_stop(self) -> None:
        self._state.write("leaving", message=LEAVING)
        self._hosts.signal_ranks(SIGNAL_TO_RANKS)

    def _kill(self) -> None:
        self._hosts.kill()
        kill_descendants(keep={self._guard, *self._hosts.pids})
