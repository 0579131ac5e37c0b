"""The ranks of a job, and what they exchange besides gradients, in MPI's words.

``Communicator`` is small on purpose: an all-reduce of numbers and an all-gather of bytes. Everything else
(agreement, JSON messages, comparisons) is built from these two, so that one fake that computes tests it
all. Nothing is ever pickled.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from horovod_train.collectives.log import Waiting

Result = TypeVar("Result")
PIECE_BYTES = 64 * 2**20


class Communicator(Protocol):
    """The ranks of a job, seen from one of them.

    Collectives block until every rank has called them, in the same order on all ranks. When a rank
    is lost they raise ``PeerError``.
    """

    @property
    def rank(self) -> int:
        """This process's number, 0 .. size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host."""
        ...

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        ...

    @property
    def waiting_since_s(self) -> float | None:
        """Since when this rank waits, by ``monotonic``; None: it does not."""
        ...

    @property
    def waiting_in(self) -> Waiting | None:
        """What this rank waits for; None: it does not wait, or unknown."""
        ...

    def wait_in(self, entry: Waiting, blocking: Callable[[], Result]) -> Result:
        """Call what blocks; record what it waits for, and since when."""
        ...

    def allreduce_sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum over ranks, in double precision; same length on all ranks."""
        ...

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank; lengths may differ."""
        ...

    def close(self) -> None:
        """Leave the world. Safe to call twice; no collective may follow."""
        ...


@dataclass(frozen=True)
class SingleRank:
    """The communicator of a process alone, without Horovod."""

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
        """Return the one rank's bytes."""
        return [data]

    def wait_in(self, entry: Waiting, blocking: Callable[[], Result]) -> Result:
        """Call it."""
        return blocking()

    def close(self) -> None:
        """Do nothing."""


def allgather_json(world: Communicator, message: object) -> list[Any]:
    """Return every rank's message, by rank. Messages are anything JSON can say."""
    return [json.loads(data) for data in world.allgather(json.dumps(message).encode())]


def broadcast_json(world: Communicator, message: object) -> Any:
    """Return rank 0's message on every rank; what other ranks pass is ignored."""
    return allgather_json(world, message if world.rank == 0 else None)[0]


def gather_to_rank_0(world: Communicator, data: bytes) -> list[bytes]:
    """Return the bytes of every rank, by rank, on rank 0, and nothing on others; for data that is large.

    One rank's after the other, and in pieces: no rank but 0 ever holds more than one piece of another.
    """
    lengths = [int(length) for length in allgather_json(world, len(data))]
    gathered = []
    for rank, length in enumerate(lengths):
        pieces = []
        for at in range(0, length, PIECE_BYTES):
            mine = data[at : at + PIECE_BYTES] if rank == world.rank else b""
            piece = world.allgather(mine)[rank]
            pieces += [piece] if world.rank == 0 else []
        gathered += [b"".join(pieces)] if world.rank == 0 else []
    return gathered


def any_rank(world: Communicator, *, flag: bool) -> bool:
    """Return whether any rank's flag is set: the same answer on every rank."""
    return world.allreduce_sum([float(flag)])[0] > 0


def barrier(world: Communicator) -> None:
    """Return when every rank has come here."""
    world.allreduce_sum([0.0])


def mean_over_ranks(world: Communicator, sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Return the mean of each quantity over all ranks, from each rank's (sum, count).

    A rank may lack a quantity. Sums are added in the order of ranks: the result is the same bit
    for bit on all of them.
    """
    totals: dict[str, tuple[float, int]] = {}
    for of_rank in allgather_json(world, sums):
        for name, (total, count) in of_rank.items():
            old_total, old_count = totals.get(name, (0.0, 0))
            totals[name] = (old_total + total, old_count + count)
    return {name: total / count for name, (total, count) in totals.items() if count}
