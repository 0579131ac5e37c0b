"""A world of threads: real collectives within one process, for tests of what ranks do together."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch

TIMEOUT_S = 60


class Board:
    """Where ranks put what they exchange; they find each other by names, as Horovod's do."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.timeout_s: float = TIMEOUT_S
        self._given: dict[Any, dict[int, Any]] = {}
        self._parts: dict[tuple[int, ...], Board] = {}
        self._changed = threading.Condition()

    def put(self, key: Any, rank: int, value: Any) -> None:
        with self._changed:
            self._given.setdefault(key, {})[rank] = value
            self._changed.notify_all()

    def all_of(self, key: Any) -> list[Any]:
        with self._changed:
            is_complete = self._changed.wait_for(lambda: len(self._given[key]) == self.size, self.timeout_s)
            assert is_complete, f"{key}: only ranks {sorted(self._given[key])} came"
            return [self._given[key][rank] for rank in range(self.size)]

    def has_all_of(self, key: Any) -> bool:
        with self._changed:
            return len(self._given[key]) == self.size

    def part(self, members: Sequence[int]) -> Board:
        with self._changed:
            return self._parts.setdefault(tuple(members), Board(len(members)))


class ThreadCommunicator:
    """One rank of a world whose ranks are threads; it exchanges tensors, too.

    Attributes:
        sent: Names of the tensors whose sum was begun.
    """

    def __init__(self, rank: int, board: Board, host: str = "here") -> None:
        self.rank = self.local_rank = rank
        self.size = board.size
        self.host = host
        self.waiting_since_s = self.waiting_in = None
        self.sent: list[str] = []
        self._board = board
        self._counts: dict[str, int] = {}

    def allreduce_sum(self, values: Sequence[float]) -> list[float]:
        everyone = self._board.all_of(self._put("allreduce_sum", list(values)))
        return [sum(column) for column in zip(*everyone, strict=True)]

    def allgather(self, data: bytes) -> list[bytes]:
        return self._board.all_of(self._put("allgather", data))

    def start_allreduce(self, tensor: Any, name: str) -> Any:
        self.sent.append(name)
        return tensor, self._put(name, tensor.detach().clone())

    def start_allgather(self, tensor: Any, name: str) -> Any:
        self.sent.append(name)
        return None, self._put(name, tensor.detach().clone())

    def start_reduce_scatter(self, tensor: Any, into: Any, name: str) -> Any:
        self.sent.append(name)
        return into, self._put(name, tensor.detach().clone())

    is_over_mpi = False

    def start_adasum(self, tensor: Any, name: str) -> Any:
        raise NotImplementedError

    def call_at_close(self, act: Callable[[], None]) -> None:
        pass

    def is_done(self, handle: Any) -> bool:
        return self._board.has_all_of(handle[1])

    def wait(self, handle: Any) -> Any:
        tensor, key = handle
        first, *others = self._board.all_of(key)
        assert all(other.shape == first.shape and other.dtype == first.dtype for other in others)
        if tensor is None:
            return torch.cat([first, *others])
        for other in others:
            first = first + other
        if tensor.shape != first.shape:  # of a reduce-scatter
            first = first.view(self.size, -1)[self.rank]
        return tensor.copy_(first)

    def broadcast(self, tensor: Any, name: str) -> None:
        tensor.detach().copy_(self._board.all_of(self._put(name, tensor.detach().clone()))[0])

    def split(self, color: int) -> ThreadCommunicator:
        """The ranks with the same color, in their order, as MPI_Comm_split has it; all ranks call it."""
        colors = self._board.all_of(self._put("split", color))
        members = [rank for rank, other in enumerate(colors) if other == color]
        return ThreadCommunicator(members.index(self.rank), self._board.part(members), self.host)

    def wait_in(self, entry: Any, blocking: Callable[[], Any]) -> Any:
        self.waiting_in, self.waiting_since_s = entry, monotonic()
        try:
            return blocking()
        finally:
            self.waiting_in = self.waiting_since_s = None

    def close(self) -> None:
        pass

    def _put(self, name: str, value: Any) -> tuple[str, int]:
        number = self._counts[name] = self._counts.get(name, 0) + 1
        self._board.put((name, number), self.rank, value)
        return name, number


def on_ranks(
    size: int, function: Callable[[Any], Any], kind: Callable[[int, Board], Any] = ThreadCommunicator
) -> list[Any]:
    """Call a function once per rank, in threads; return results by rank, errors as values.

    Garbage is not collected meanwhile: PyTorch holds the lock of its random generator while it creates the
    tensor of a state. A collection in this call waits for the GIL, which a thread may hold that waits for the
    generator. A real rank uses the generator in one thread.
    """
    board = Board(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(kind(rank, board))
        except Exception as error:  # noqa: BLE001
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
    finally:
        gc.enable()
    return results
