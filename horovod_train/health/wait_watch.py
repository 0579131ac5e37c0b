"""Watches, in a thread, for how long this rank waits: for its data, or for its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread

from horovod_train.errors import HorovodTrainError


@dataclass(frozen=True)
class Wait:
    """A wait that has not ended.

    Attributes:
        since_s: When it began, by the monotonic clock. A wait with another beginning is another wait.
        shutdown_s: The rank is ended when the wait is longer.
        report: Returns a sentence for a person from the length of the wait in seconds.
        error: Returns the error that ends the rank from the length of the wait in seconds.
    """

    since_s: float
    shutdown_s: float
    report: Callable[[float], str]
    error: Callable[[float], HorovodTrainError]


class WaitWatch:
    """Reports each wait that is long once, and ends the rank when one is too long.

    Args:
        look: Returns the wait of now; None: this rank does not wait.
        interval_s: Time between two looks.
        warning_s: A wait that is longer is reported.
        warn: Prints a warning.
        end: Ends this process with an error: the main thread cannot be reached.
    """

    def __init__(
        self,
        look: Callable[[], Wait | None],
        *,
        interval_s: float,
        warning_s: float,
        warn: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        self._look = look
        self._interval_s = interval_s
        self._warning_s = warning_s
        self._warn = warn
        self._end = end
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        since_s, elapsed_s, is_reported = None, 0.0, False
        while not self._over.wait(self._interval_s):
            wait = self._look()
            if wait is None or wait.since_s != since_s:
                since_s, elapsed_s, is_reported = None if wait is None else wait.since_s, 0.0, False
                continue
            elapsed_s += self._interval_s  # not by a clock, which runs while this process is stopped
            if elapsed_s >= self._warning_s and not is_reported:
                is_reported = True
                self._warn(wait.report(elapsed_s))
            if elapsed_s >= wait.shutdown_s:
                self._end(wait.error(elapsed_s))
                return
