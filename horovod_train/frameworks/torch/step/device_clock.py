"""Time on a device, measured by events in its queue: the host only enqueues work."""

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
        """Enqueue a mark after the work that is enqueued now; returns immediately."""
        ...

    def is_reached(self, mark: Any) -> bool:
        """Return whether the device has reached a mark; non-blocking, from any thread."""
        ...

    def seconds_between(self, first: Any, second: Any) -> float:
        """Return the device time between two reached marks."""
        ...

    def release(self, marks: Iterable[Any]) -> None:
        """Release marks that are no longer needed."""
        ...


class CudaTimer:
    """Timer with CUDA events on the current stream, which are reused."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """Enqueue an event after the work that is enqueued now."""
        if not self._free:
            self._free.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._free.pop()
        event.record()
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Return whether the device has reached a mark."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Return the device time between two events."""
        return first.elapsed_time(second) / 1e3

    def release(self, marks: Iterable[torch.cuda.Event]) -> None:
        """Release events for reuse."""
        self._free.extend(marks)


class HostTimer:
    """Timer for a CPU, where work is not enqueued."""

    def mark(self) -> float:
        """Return the time."""
        return perf_counter()

    def is_reached(self, mark: float) -> bool:
        """Return True."""
        return True

    def seconds_between(self, first: float, second: float) -> float:
        """Return the difference."""
        return second - first

    def release(self, marks: Iterable[float]) -> None:
        """Do nothing."""


class DeviceClock(StepClock):
    """Clock of a step's phases on the device; durations are available after ``read``.

    A phase is the device time between two laps. The optimizer phase is the time of its kernels, and reading
    data takes no time while the device has other work. ``synchronizes``: the update reads numbers from
    the device.
    """

    def __init__(self, timer: Timer, *, synchronizes: bool = False) -> None:
        super().__init__()
        self._timer = timer
        self._settles = synchronizes
        self._laps: list[tuple[str, Any]] = [("", timer.mark())]

    def lap(self, phase: str) -> None:
        """End a phase."""
        self._laps.append((phase, self._timer.mark()))

    def settle(self, ranks: Communicator, read: Callable[[], object]) -> None:
        """If the update would wait for the device, wait by ``read`` here, where ``ranks`` records it."""
        if self._settles:
            ranks.wait_in(DeviceWork(self.phase), read)

    def phase(self) -> str:
        """Return the current phase of the device; empty: none. Another thread may call it."""
        return next((phase for phase, mark in self._laps if not self._timer.is_reached(mark)), "")

    def read(self) -> None:
        """Compute the durations of phases; must be called once, after the device has reached the last lap."""
        marks = [mark for _, mark in self._laps]
        for (_, before), (phase, after) in pairwise(self._laps):
            seconds = self._timer.seconds_between(before, after)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._begun, self._last = 0.0, self._timer.seconds_between(marks[0], marks[-1])
        self._timer.release(marks)
