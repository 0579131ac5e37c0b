"""Watches for how long this rank waits for its own data.

A rank whose loader hangs is missed by the others in a collective. A world of one has no others, and where
the loaders of all ranks hang, no rank is in a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Health
from horovod_train.errors import HorovodTrainError, LostError

INTERVAL_S = 0.5


class DataWatch:
    """Reports a long wait for data, and ends the rank when it is too long.

    Args:
        world: The ranks. Where there are others, they come first: they know that this one is missing.
        health: When to report, and when to end.
        waiting_since_s: Returns when the wait of now began; None: data is not waited for.
        tell: Reports to a person.
        end: Ends this process with an error.
    """

    def __init__(
        self,
        world: Communicator,
        health: Health,
        waiting_since_s: Callable[[], float | None],
        tell: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        self._rank = world.rank
        self._warning_s = health.stall_warning_s
        self._shutdown_s = health.stall_shutdown_s * (1.0 if world.size == 1 else 1.5)
        self._waiting_since_s = waiting_since_s
        self._tell = tell
        self._end = end
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        since_s, waited_s = None, 0.0
        is_reported = False
        while not self._over.wait(INTERVAL_S):
            now_since_s = self._waiting_since_s()
            if now_since_s is None or now_since_s != since_s:
                since_s, waited_s, is_reported = now_since_s, 0.0, False
                continue
            waited_s += INTERVAL_S  # not by a clock, which goes on while this process is stopped
            what = f"rank {self._rank} has waited for its data for {waited_s:.0f} s"
            hang = "a loader process, the disk or the dataset's __getitem__ hangs"
            if waited_s >= self._warning_s and not is_reported:
                is_reported = True
                self._tell(f"{what}: perhaps {hang}")
            if waited_s >= self._shutdown_s:
                self._end(
                    LostError(
                        f"{what}, and was ended after health.stall_shutdown_s",
                        hint=f"{hang}; set health.stall_shutdown_s higher if it is only slow",
                    )
                )
                return
