"""Ring buffer of a rank's last collectives, always enabled; it names the tensor of a hung collective."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import ClassVar

LENGTH = 256


@dataclass(slots=True)
class Collective:
    """One collective of this rank.

    Attributes:
        name: Name, equal on all ranks.
        size_bytes: Size of this rank's input.
        begun_s: Start time (``monotonic``).
        ended_s: Time at which this rank received the result; None: not yet.
    """

    name: str
    size_bytes: int
    begun_s: float
    ended_s: float | None = None
    is_collective: ClassVar[bool] = True

    def __str__(self) -> str:
        """Return name and size.

        >>> str(Collective("horovod_train.bucket.0.3", 8 * 2**20, 0.0))
        'horovod_train.bucket.0.3 (8.0 MiB)'
        """
        return f"{self.name} ({self.size_bytes / 2**20:.1f} MiB)"


@dataclass(slots=True, frozen=True)
class DeviceWork:
    """Work queued on this rank's device, while the host waits for its end.

    Attributes:
        phase: Function that returns the phase of the step that the device executes.
    """

    phase: Callable[[], str]

    @property
    def is_collective(self) -> bool:
        """Whether the device itself waits for data of other ranks."""
        return self.phase() == "allreduce_wait"

    def __str__(self) -> str:
        """Return the phase, as text for the user."""
        return f"its device's {self.phase()}"


Waiting = Collective | DeviceWork
"""Object of a wait: a collective, or work of the device."""


class CollectiveLog:
    """Ring buffer of the last collectives, in the order in which they were started."""

    def __init__(self, length: int = LENGTH) -> None:
        self._entries: deque[Collective] = deque(maxlen=length)

    def begin(self, name: str, size_bytes: int) -> Collective:
        """Record the start of a collective."""
        entry = Collective(name, size_bytes, monotonic())
        self._entries.append(entry)
        return entry

    def entries(self) -> list[Collective]:
        """Return the collectives, oldest first. Only the thread that starts collectives may call this."""
        return list(self._entries)
