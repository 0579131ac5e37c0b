"""Watches for how long this rank waits for its own data.

A rank whose loader hangs is missed by the others in a collective. A world of one has no others, and where
the loaders of all ranks hang, no rank is in a collective.
"""

from __future__ import annotations

from collections.abc import Callable

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Health
from horovod_train.errors import HorovodTrainError, LostError
from horovod_train.health.wait_watch import Wait, WaitWatch

INTERVAL_S = 0.5
HANG = "a loader process, the disk or the dataset's __getitem__ hangs"


class DataWatch(WaitWatch):
    """Reports a long wait for data, and ends the rank when it is too long.

    Args:
        world: The ranks. Where there are others, they come first: they know that this one is missing.
        health: When to report, and when to end.
        waiting_since_s: Returns when the wait of now began; None: data is not waited for.
        warn: Prints a warning.
        end: Ends this process with an error.
    """

    def __init__(
        self,
        world: Communicator,
        health: Health,
        waiting_since_s: Callable[[], float | None],
        warn: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        self._rank = world.rank
        self._shutdown_s = health.stall_shutdown_s * (1.0 if world.size == 1 else 1.5)
        self._waiting_since_s = waiting_since_s
        super().__init__(
            self._wait, interval_s=INTERVAL_S, warning_s=health.stall_warning_s, warn=warn, end=end
        )

    def _wait(self) -> Wait | None:
        since_s = self._waiting_since_s()
        return None if since_s is None else Wait(since_s, self._shutdown_s, self._report, self._error)

    def _state(self, elapsed_s: float) -> str:
        return f"rank {self._rank} has waited for its data for {elapsed_s:.0f} s"

    def _report(self, elapsed_s: float) -> str:
        return f"{self._state(elapsed_s)}: perhaps {HANG}"

    def _error(self, elapsed_s: float) -> LostError:
        return LostError(
            f"{self._state(elapsed_s)}, and was ended after health.stall_shutdown_s",
            hint=f"{HANG}; set health.stall_shutdown_s higher if it is only slow",
        )
