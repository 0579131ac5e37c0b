"""The communicator of a job's ranks, for all communication except gradients; names follow MPI.

    Communicator, SingleRank    the ranks of a job, and a job of one rank
    Splits, Mesh                the communicators of a rank: all ranks, and its data-parallel group
    CollectiveLog               ring buffer of a rank's last collectives, always enabled, which names the
                                tensor of a hung collective
    allgather_json, any_rank, barrier, ...
                                functions that use the two collectives

``Communicator`` has two collectives, an all-reduce of numbers and an all-gather of bytes, so that tests
need only a small fake. Agreement, JSON messages and comparisons use these two. Messages are never pickled.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from horovod_train.config.support import Axes
from horovod_train.errors import UserError

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


Result = TypeVar("Result")
CHUNK_BYTES = 64 * 2**20


class Communicator(Protocol):
    """The ranks of a job, as an object of one rank.

    Every rank must call the same collectives in the same order. A collective blocks until all ranks have
    called it, and raises ``PeerError`` when a rank is lost.
    """

    @property
    def rank(self) -> int:
        """Rank of this process, 0 .. size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def local_rank(self) -> int:
        """Rank of this process among the ranks of its host."""
        ...

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        ...

    @property
    def waiting_since_s(self) -> float | None:
        """Start time of the current wait of this rank (``monotonic``); None: not waiting."""
        ...

    @property
    def waiting_in(self) -> Waiting | None:
        """The collective or device work that this rank waits for; None: not waiting, or unknown."""
        ...

    def wait_in(self, entry: Waiting, blocking: Callable[[], Result]) -> Result:
        """Call a blocking function, and record the wait and its start time."""
        ...

    def allreduce_sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum over ranks, in float64; lengths must be equal on all ranks."""
        ...

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in the order of ranks; lengths may differ."""
        ...

    def close(self) -> None:
        """Shut down communication. Safe to call twice; no collective may follow."""
        ...


@dataclass(frozen=True)
class SingleRank:
    """Communicator of a single process, without Horovod."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    host: str = field(default_factory=socket.gethostname)
    waiting_since_s: float | None = None
    waiting_in: Waiting | None = None

    def allreduce_sum(self, values: Sequence[float]) -> list[float]:
        """Return the values."""
        return list(values)

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of this rank."""
        return [data]

    def wait_in(self, entry: Waiting, blocking: Callable[[], Result]) -> Result:
        """Call the function."""
        return blocking()

    def close(self) -> None:
        """Do nothing."""


def allgather_json(world: Communicator, message: object) -> list[Any]:
    """Return the messages of all ranks, in the order of ranks. Messages must be JSON-serializable."""
    return [json.loads(data) for data in world.allgather(json.dumps(message).encode())]


def broadcast_json(world: Communicator, message: object) -> Any:
    """Return rank 0's message on every rank; messages of other ranks are ignored."""
    return allgather_json(world, message if world.rank == 0 else None)[0]


def gather_to_rank_0(world: Communicator, data: bytes) -> list[bytes]:
    """Gather large data on rank 0: return the bytes of every rank, in the order of ranks; others return [].

    Each rank's data is sent in turn, in chunks. Ranks other than 0 store at most one chunk of another rank.
    """
    lengths = [int(length) for length in allgather_json(world, len(data))]
    gathered = []
    for rank, length in enumerate(lengths):
        pieces = []
        for at in range(0, length, CHUNK_BYTES):
            mine = data[at : at + CHUNK_BYTES] if rank == world.rank else b""
            piece = world.allgather(mine)[rank]
            pieces += [piece] if world.rank == 0 else []
        gathered += [b"".join(pieces)] if world.rank == 0 else []
    return gathered


def any_rank(world: Communicator, *, flag: bool) -> bool:
    """Return whether any rank's flag is set (a logical-or all-reduce)."""
    return world.allreduce_sum([float(flag)])[0] > 0


def barrier(world: Communicator) -> None:
    """Block until every rank has called this."""
    world.allreduce_sum([0.0])


def mean_over_ranks(world: Communicator, sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Return the mean of each quantity over all ranks, from each rank's (sum, count).

    A rank may lack a quantity. The result is bitwise identical on all ranks because sums are added in the
    order of ranks.
    """
    totals: dict[str, tuple[float, int]] = {}
    for of_rank in allgather_json(world, sums):
        for name, (total, count) in of_rank.items():
            old_total, old_count = totals.get(name, (0.0, 0))
            totals[name] = (old_total + total, old_count + count)
    return {name: total / count for name, (total, count) in totals.items() if count}


@runtime_checkable
class Splits(Protocol):
    """A communicator that can be split into groups."""

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return the communicator of the group that contains this rank."""
        ...


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job and the data-parallel group of this rank.

    The samples of a rank, the mean over a step and the scale of the learning rate depend on ``data``, never
    on ``world``. With data parallelism alone, both are the same communicator.

    Attributes:
        world: All ranks.
        data: This rank's data-parallel group. Its ranks store the same part of the model and read different
            samples; together they read all samples of a step.
        axes: Arrangement of all ranks.
    """

    world: Communicator
    data: Communicator
    axes: Axes = field(default_factory=lambda: Axes(1))

    @classmethod
    def of(cls, world: Communicator, axes: Axes) -> Mesh:
        """Return the mesh of ranks that are arranged along axes; every rank must call it.

        Raises:
            UserError: The communicator cannot be split.
        """
        if axes.data == world.size:
            return cls(world, world, axes)
        if not isinstance(world, Splits):
            raise UserError("this framework does not support model parallelism", hint="use framework: torch")
        return cls(world, world.split(axes.data_groups()), axes)

    @classmethod
    def data_parallel(cls, world: Communicator) -> Mesh:
        """Return the mesh of a job with data parallelism alone."""
        return cls(world, world, Axes(world.size))
