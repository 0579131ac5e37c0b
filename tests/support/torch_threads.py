"""Horovod's PyTorch binding on a world of threads: the real framework on several ranks, in milliseconds."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from programs import cases

from horovod_train.frameworks.torch.collectives import TorchCommunicator

TIMEOUT_S = 20


@cache
def model_of(dtype: torch.dtype, *, partly_used: bool) -> torch.nn.Module:
    """The model of a case. Made before threads are: they share the random generator."""
    return cases.Task(str(dtype).removeprefix("torch."), partly_used).model()


class Task(cases.Task):
    """The task of the cases, with a copy of the one model."""

    def model(self) -> torch.nn.Module:
        return copy.deepcopy(model_of(self.dtype, partly_used=self.partly_used))


class Board:
    """Where ranks put what they exchange; they find each other by names, as Horovod's do."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
        self._changed = threading.Condition()

    def put(self, key: tuple[str, int], rank: int, tensor: torch.Tensor) -> None:
        with self._changed:
            self._given.setdefault(key, {})[rank] = tensor.clone()
            self._changed.notify_all()

    def all_of(self, key: tuple[str, int]) -> list[torch.Tensor]:
        with self._changed:
            is_complete = self._changed.wait_for(lambda: len(self._given[key]) == self.size, TIMEOUT_S)
            assert is_complete, f"{key}: only ranks {sorted(self._given[key])} came"
            return [self._given[key][rank] for rank in range(self.size)]


class ThreadHvd:
    """What ``horovod.torch`` offers, as far as this package uses it."""

    Sum = "sum"

    def __init__(self, rank: int, board: Board) -> None:
        self._rank = rank
        self._board = board
        self._counts: dict[str, int] = {}
        self.is_up = True

    def is_initialized(self) -> bool:
        return self.is_up

    def shutdown(self) -> None:
        self.is_up = False

    def allreduce_async_(self, tensor: torch.Tensor, name: str, op: str) -> Any:
        assert op == self.Sum
        return tensor, self._put(name, tensor)

    def synchronize(self, handle: Any) -> torch.Tensor:
        tensor, key = handle
        first, *others = self._board.all_of(key)
        assert all(other.shape == first.shape for other in others)
        for other in others:
            first = first + other
        return tensor.copy_(first)

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return torch.cat(self._board.all_of(self._put(name, tensor)))

    def broadcast_(self, tensor: torch.Tensor, root_rank: int, name: str) -> torch.Tensor:
        return tensor.copy_(self._board.all_of(self._put(name, tensor))[root_rank])

    def _put(self, name: str, tensor: torch.Tensor) -> tuple[str, int]:
        number = self._counts[name] = self._counts.get(name, 0) + 1
        self._board.put((name, number), self._rank, tensor.detach())
        return name, number


class TorchThreads(TorchCommunicator):
    """The real ``TorchCommunicator``, that has not started Horovod."""

    def __init__(self, rank: int, board: Board, host: str = "here") -> None:
        self.hvd = ThreadHvd(rank, board)
        self.lost = ()
        self.rank = self.local_rank = rank
        self.size = board.size
        self.host = host
        self.waiting_since_s = None
        self.at_close = ExitStack()


def on_torch_ranks(size: int, function: Callable[[TorchThreads], Any]) -> list[Any]:
    """Call a function once per rank, in threads; return results by rank, errors as values."""
    board = Board(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(TorchThreads(rank, board))
        except Exception as error:  # noqa: BLE001
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
