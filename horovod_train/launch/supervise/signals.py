"""Ending a run from outside: first the ranks are asked to save and leave, then what is left is killed.

    SIGUSR1, SIGUSR2             ask, and wait as long as it takes
    SIGTERM, SIGINT, SIGHUP      ask, and kill when the grace is over
    the second of them           kill at once (SIGHUP does not count: a terminal that is closed sends two)

Launchers are not relied on for this: mpirun kills its ranks a second after SIGTERM, horovodrun five
seconds after.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from types import FrameType
from typing import Any

ASK_AGAIN_S = 1.0
_PATIENT = (signal.SIGUSR1, signal.SIGUSR2)
_IN_A_HURRY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALS = (*_PATIENT, *_IN_A_HURRY)


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While the block runs, a handler gets every signal that ends a run; main thread only."""
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def heard_at_once(note: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, a thread of its own is told of every signal that ends a run; main thread only.

    A handler in Python runs in the main thread, and not before that comes back from the call it is in. If a
    signal arrives just before a call blocks, or at another thread, that may be never.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def hear() -> None:
        while numbers := os.read(reading, 64):  # nothing: the other end is closed
            for number in numbers:
                if number in _SIGNALS:
                    note(number)

    thread = Thread(target=hear, daemon=True)
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
def remembered_signals() -> Iterator[list[int]]:
    """While the block runs, signals that nobody handles are noted in the list that it yields."""
    asked: list[int] = []
    with handling_signals(lambda number, _: asked.append(number)):
        yield asked


@contextmanager
def interrupted_by_signals(
    error_of: Callable[[int], BaseException], asked: Sequence[int] = ()
) -> Iterator[None]:
    """While the block runs, a signal ends it: no rank has been started that would have to save.

    Args:
        error_of: The error to raise, by the number of the signal.
        asked: Signals that came before; the first of them ends the block at once.
    """

    def interrupt(number: int, _frame: FrameType | None = None) -> None:
        raise error_of(number)

    with handling_signals(interrupt):
        if asked:
            interrupt(asked[0])
        yield


class AskedTo(BaseException):
    """A signal, as something that can be caught.

    Args:
        number: Which one.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.is_patient = number in _PATIENT


class Stopper:
    """Turns signals to this process into an orderly end of the run.

    Args:
        ask: Asks all ranks to save and leave.
        kill: Kills all processes of the run.
        grace_s: Time between the two, in seconds.
    """

    def __init__(self, ask: Callable[[], object], kill: Callable[[], object], grace_s: float) -> None:
        self.received: int | None = None
        """The first signal; None: none came."""
        self._ask = ask
        self._kill = kill
        self._grace_s = grace_s
        self._deadline_s = float("inf")
        self._wake = Event()
        self._is_over = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Act on signals while the block runs; main thread only."""
        worker = Thread(target=self._work)
        with heard_at_once(self._note):
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

    def _note(self, number: int) -> None:
        if number in _IN_A_HURRY:
            if self._deadline_s == float("inf"):
                self._deadline_s = monotonic() + self._grace_s
            elif number != signal.SIGHUP:
                self._deadline_s = 0.0
        if self.received is None or self.received in _PATIENT:
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
                self._ask()
            self._wake.wait(min(ASK_AGAIN_S, max(0.05, self._deadline_s - monotonic())))
