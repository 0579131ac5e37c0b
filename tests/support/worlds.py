"""A world of threads: real collectives within one process, for tests of what ranks do together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


class ThreadCommunicator:
    """One rank of a world whose ranks are threads."""

    def __init__(self, rank: int, size: int, shared: _Shared, host: str = "here") -> None:
        self.rank = rank
        self.size = size
        self.local_rank = rank
        self.host = host
        self.waiting_since_s = None
        self._shared = shared

    def allreduce_sum(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._exchange(list(values)), strict=True)]

    def allgather(self, data: bytes) -> list[bytes]:
        return self._exchange(data)

    def split(self, color: int) -> ThreadCommunicator:
        """The ranks with the same color, in their order, as MPI_Comm_split has it; all ranks call it."""
        colors = self._exchange(color)
        members = [rank for rank, other in enumerate(colors) if other == color]
        with self._shared.lock:
            shared = self._shared.parts.setdefault((color, *members), _Shared(len(members)))
        return ThreadCommunicator(members.index(self.rank), len(members), shared, self.host)

    def close(self) -> None:
        pass

    def _exchange(self, mine: Any) -> list[Any]:
        shared = self._shared
        shared.slots[self.rank] = mine
        shared.barrier.wait(timeout=5)
        result = list(shared.slots)
        shared.barrier.wait(timeout=5)
        return result


class _Shared:
    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.lock = threading.Lock()
        self.parts: dict[tuple[int, ...], _Shared] = {}


def on_ranks(size: int, function: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """Call a function once per rank, in threads; return results by rank, errors as values."""
    shared = _Shared(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(rank, size, shared))
        except Exception as error:  # noqa: BLE001
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
