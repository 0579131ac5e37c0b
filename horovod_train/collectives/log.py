"""The last collectives of a rank: what it waits for, and what it did before.

A ring buffer, cheap enough to be always on: a hang names the tensor that others have not sent.
"""

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
        name: The same on all ranks.
        size_bytes: What this rank gives.
        begun_s: When it was begun, by ``monotonic``.
        ended_s: When this rank had its result; None: not yet.
    """

    name: str
    size_bytes: int
    begun_s: float
    ended_s: float | None = None
    is_collective: ClassVar[bool] = True

    def __str__(self) -> str:
        """Return it for a person.

        >>> str(Collective("horovod_train.bucket.0.3", 8 * 2**20, 0.0))
        'horovod_train.bucket.0.3 (8.0 MiB)'
        """
        return f"{self.name} ({self.size_bytes / 2**20:.1f} MiB)"


@dataclass(slots=True, frozen=True)
class DeviceWork:
    """What this rank's device has been given to do, when the host has come so far that it waits for it.

    Attributes:
        phase: Returns the phase of the step that the device is in.
    """

    phase: Callable[[], str]

    @property
    def is_collective(self) -> bool:
        """Whether the device itself waits, for data of other ranks."""
        return self.phase() == "allreduce_wait"

    def __str__(self) -> str:
        """Return it for a person."""
        return f"its device's {self.phase()}"


Waiting = Collective | DeviceWork
"""What a rank waits for."""


class CollectiveLog:
    """Remembers the last collectives, in the order in which they were begun."""

    def __init__(self, length: int = LENGTH) -> None:
        self._entries: deque[Collective] = deque(maxlen=length)

    def begin(self, name: str, size_bytes: int) -> Collective:
        """Note that a collective is begun."""
        entry = Collective(name, size_bytes, monotonic())
        self._entries.append(entry)
        return entry

    def entries(self) -> list[Collective]:
        """Return them, the oldest first; for the thread that begins them."""
        return list(self._entries)
