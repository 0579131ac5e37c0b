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
