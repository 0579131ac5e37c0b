"""Time on a device: the host queues work and does not see when it runs, events in the queue do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

import torch

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.log import DeviceWork
from horovod_train.frameworks.base import StepClock


class Timer(Protocol):
    """Marks in the queue of a device's work."""

    def mark(self) -> Any:
        """Put a mark behind the work that is queued now; returns at once."""
        ...

    def is_reached(self, mark: Any) -> bool:
        """Return whether the device has reached a mark; non-blocking, from any thread."""
        ...

    def seconds_between(self, first: Any, second: Any) -> float:
        """Return the device time between two reached marks."""
        ...

    def release(self, marks: Iterable[Any]) -> None:
        """Release marks that are not needed any more."""
        ...


class CudaTimer:
    """CUDA's events on the current stream; each is used again."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """Put a mark behind the work that is queued now."""
        if not self._free:
            self._free.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._free.pop()
        event.record()
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Return whether the device has reached a mark."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Return the device's time between two marks."""
        return first.elapsed_time(second) / 1e3

    def release(self, marks: Iterable[torch.cuda.Event]) -> None:
        """Take marks back."""
        self._free.extend(marks)


class HostTimer:
    """The same for a CPU, where work is not enqueued."""

    def mark(self) -> float:
        """Return the time."""
        return perf_counter()

    def is_reached(self, mark: float) -> bool:
        """Return that it has."""
        return True

    def seconds_between(self, first: float, second: float) -> float:
        """Return the difference."""
        return second - first

    def release(self, marks: Iterable[float]) -> None:
        """Do nothing."""


class DeviceClock(StepClock):
    """Splits a step's time on the device into phases; known when ``read`` has been called.

    A phase is what the device did, or waited for, between two laps: the time of the optimizer is that of
    its kernels, and data that was read while the device had other work to do took none.

    Args:
        timer: Marks times on the device.
        settles: The update of the step reads numbers from the device.
    """

    def __init__(self, timer: Timer, *, settles: bool = False) -> None:
        super().__init__()
        self._timer = timer
        self._settles = settles
        self._laps: list[tuple[str, Any]] = [("", timer.mark())]

    def lap(self, phase: str) -> None:
        """End a phase."""
        self._laps.append((phase, self._timer.mark()))

    def settle(self, ranks: Communicator, read: Callable[[], object]) -> None:
        """Read a number of the device here, where the watchdog sees the pending work, if the update will.

        Args:
            ranks: The ranks; they learn that this one waits for its device.
            read: Waits for the number.
        """
        if self._settles:
            ranks.wait_in(DeviceWork(self.phase), read)

    def phase(self) -> str:
        """Return the phase that the device is in, for a thread that looks on; empty: in none of them."""
        return next((phase for phase, mark in self._laps if not self._timer.is_reached(mark)), "")

    def read(self) -> None:
        """Compute the durations of phases, once, after the device has reached the last lap."""
        marks = [mark for _, mark in self._laps]
        for (_, before), (phase, after) in pairwise(self._laps):
            seconds = self._timer.seconds_between(before, after)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._begun, self._last = 0.0, self._timer.seconds_between(marks[0], marks[-1])
        self._timer.release(marks)
