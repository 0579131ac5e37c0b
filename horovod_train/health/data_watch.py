"""Monitor how long this rank waits for its own data.

Other ranks detect a rank whose loader hangs, because they wait for it in a collective. They cannot do so if
there is only one rank, or if the loaders of all ranks hang.
"""

from __future__ import annotations

from collections.abc import Callable

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Health
from horovod_train.errors import HorovodTrainError, LostError
from horovod_train.health.wait_watch import Wait, WaitWatch

HANG = "a loader process, the disk or the dataset's __getitem__ hangs"


class DataWatch(WaitWatch):
    """Watchdog that reports a long wait for data, and ends the rank if the wait is too long.

    Args:
        world: The communicator. If it has other ranks, this rank ends later, so that they report first.
        health: Times after which to warn, and after which to end the rank.
        waiting_since_s: Returns the start of the current wait for data; None: not waiting.
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
        self._factor = 1.0 if world.size == 1 else 1.5
        self._shutdown_s = health.stall_shutdown_s * self._factor
        self._waiting_since_s = waiting_since_s
        super().__init__(self._wait, health, warn, end)

    def _wait(self) -> Wait | None:
        since_s = self._waiting_since_s()
        return None if since_s is None else Wait(since_s, self._shutdown_s, self._report, self._error)

    def _state(self, elapsed_s: float) -> str:
        return f"rank {self._rank} has waited for its data for {elapsed_s:.0f} s"

    def _report(self, elapsed_s: float) -> str:
        return f"{self._state(elapsed_s)}: perhaps {HANG}"

    def _error(self, elapsed_s: float) -> LostError:
        factor = "" if self._factor == 1 else f"{self._factor} x "
        return LostError(
            f"{self._state(elapsed_s)}, and was ended after {factor}health.stall_shutdown_s",
            hint=f"{HANG}; set health.stall_shutdown_s higher if it is only slow",
        )
