"""Limit the time in which a rank joins the other ranks, because ``MPI_Init`` has no timeout."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from horovod_train.config.schema import Health
from horovod_train.errors import HorovodTrainError, LostError
from horovod_train.health.wait_watch import Wait, WaitWatch

# A rank that has not joined may still be importing packages from a slow disk.
MIN_SHUTDOWN_S = 600.0


class JoinWatch(WaitWatch):
    """Watchdog that reports a long wait for other ranks to join, and ends the rank if it is too long."""

    def __init__(
        self, health: Health, warn: Callable[[str], None], end: Callable[[HorovodTrainError], None]
    ) -> None:
        shutdown_s = max(health.stall_shutdown_s, MIN_SHUTDOWN_S)
        wait = Wait(monotonic(), shutdown_s, self._report, self._error)
        super().__init__(lambda: wait, health, warn, end)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()

    def _state(self, elapsed_s: float) -> str:
        return f"this rank has waited for {elapsed_s:.0f} s for the others to join"

    def _report(self, elapsed_s: float) -> str:
        return f"{self._state(elapsed_s)}: check that all were started, and that none is stopped or slow"

    def _error(self, elapsed_s: float) -> LostError:
        limit = f"health.stall_shutdown_s (at least {MIN_SHUTDOWN_S:g} s)"
        return LostError(f"{self._state(elapsed_s)}; ended after {limit}")
