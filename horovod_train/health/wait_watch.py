"""Base class of watchdog threads, which monitor how long this rank waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread

from horovod_train.config.schema import Health
from horovod_train.errors import HorovodTrainError

INTERVAL_S = 0.5
"""Time between two checks for a wait."""


@dataclass(frozen=True)
class Wait:
    """A wait that has not ended.

    Attributes:
        since_s: Start of the wait (``monotonic``), which identifies it.
        shutdown_s: Length of a wait that ends the rank, in seconds.
        report: Returns a human-readable sentence, given the length of the wait in seconds.
        error: Returns the error that ends the rank, given the length of the wait in seconds.
    """

    since_s: float
    shutdown_s: float
    report: Callable[[float], str]
    error: Callable[[float], HorovodTrainError]


class WaitWatch:
    """Watchdog that reports each long wait once, and ends the rank if a wait is too long.

    Args:
        current_wait: Returns the current wait; None: this rank does not wait.
        health: Time after which to warn.
        warn: Prints a warning.
        end: Ends this process with an error, because the main thread is blocked.
    """

    def __init__(
        self,
        current_wait: Callable[[], Wait | None],
        health: Health,
        warn: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        self._current_wait = current_wait
        self._interval_s = INTERVAL_S
        self._warning_s = health.stall_warning_s
        self._warn = warn
        self._end = end
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the watchdog. Idempotent."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        since_s, elapsed_s, is_reported = None, 0.0, False
        while not self._over.wait(self._interval_s):
            wait = self._current_wait()
            if wait is None or wait.since_s != since_s:
                since_s, elapsed_s, is_reported = None if wait is None else wait.since_s, 0.0, False
                continue
            elapsed_s += self._interval_s  # a clock would also run while this process is stopped
            if elapsed_s >= min(self._warning_s, wait.shutdown_s) and not is_reported:
                is_reported = True
                self._warn(wait.report(elapsed_s))
            if elapsed_s >= wait.shutdown_s:
                self._end(wait.error(elapsed_s))
                return
