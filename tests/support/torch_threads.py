"""Horovod's PyTorch binding on a world of threads: the real framework on several ranks, in milliseconds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from programs import cases

from horovod_train.collectives.base import CollectiveLog, Mesh
from horovod_train.config.arguments import for_ranks
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator
from horovod_train.frameworks.torch.framework import TorchFramework
from horovod_train.training.run import Run
from horovod_train.worker import make_run
from support.worlds import Board, on_ranks


@cache
def model_of(dtype: torch.dtype, *, partly_used: bool) -> torch.nn.Module:
    """The model of a case. Made before threads are: they share the random generator."""
    return cases.Task(str(dtype).removeprefix("torch."), partly_used).model()


class Task(cases.Task):
    """The task of the cases, with a copy of the one model."""

    def model(self) -> torch.nn.Module:
        return copy.deepcopy(model_of(self.dtype, partly_used=self.partly_used))


def adasum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """As Horovod computes it: neighbours first, then the results of neighbours."""
    if len(tensors) == 1:
        return tensors[0]
    half = len(tensors) // 2
    a, b = adasum(tensors[:half]).double(), adasum(tensors[half:]).double()
    dot, aa, bb = ((x * y).sum() for x, y in ((a, b), (a, a), (b, b)))
    of_a = 1 - dot / (2 * aa) if aa > 0 else 1.0
    of_b = 1 - dot / (2 * bb) if bb > 0 else 1.0
    return (of_a * a + of_b * b).to(tensors[0].dtype)


class ThreadHvd:
    """What ``horovod.torch`` offers, as far as this package uses it."""

    Sum = "sum"
    Adasum = "adasum"

    def __init__(self, rank: int, board: Board) -> None:
        self._rank = rank
        self._board = board
        self._counts: dict[str, int] = {}
        self._is_adasum: dict[str, bool] = {}
        self.is_up = True

    def is_initialized(self) -> bool:
        return self.is_up

    def shutdown(self) -> None:
        self.is_up = False

    def allreduce_async_(self, tensor: torch.Tensor, name: str, op: str) -> Any:
        assert op in {self.Sum, self.Adasum}
        self._is_adasum[name] = op == self.Adasum
        return tensor, self._put(name, tensor)

    def allgather_async(self, tensor: torch.Tensor, name: str) -> Any:
        return None, self._put(name, tensor)

    def reducescatter_async(self, tensor: torch.Tensor, name: str, op: str) -> Any:
        assert op == self.Sum
        return self._rank, self._put(name, tensor)

    def mpi_enabled(self) -> bool:
        return self._board.size != 3  # as over Gloo

    def alltoall_async(self, tensor: torch.Tensor, splits: torch.Tensor, name: str) -> Any:
        return splits.tolist(), self._put(name, tensor)

    def poll(self, handle: Any) -> bool:
        return self._board.has_all_of(handle[1])

    def synchronize(self, handle: Any) -> Any:
        tensor, key = handle
        if isinstance(tensor, list):  # of an all-to-all
            parts = [each.split(tensor)[self._rank] for each in self._board.all_of(key)]
            return torch.cat(parts), torch.tensor([len(part) for part in parts])
        if tensor is None:
            return torch.cat(self._board.all_of(key))
        if self._is_adasum.get(key[0]):
            return tensor.copy_(adasum(self._board.all_of(key)))
        first, *others = self._board.all_of(key)
        assert all(other.shape == first.shape for other in others)
        for other in others:
            first = first + other
        if isinstance(tensor, int):
            return first.view(self._board.size, -1)[tensor].clone()
        return tensor.copy_(first)

    def allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return torch.cat(self._board.all_of(self._put(name, tensor)))

    def broadcast_(self, tensor: torch.Tensor, root_rank: int, name: str) -> torch.Tensor:
        return tensor.copy_(self._board.all_of(self._put(name, tensor))[root_rank])

    def _put(self, name: str, tensor: torch.Tensor) -> tuple[str, int]:
        number = self._counts[name] = self._counts.get(name, 0) + 1
        self._board.put((name, number), self._rank, tensor.detach().clone())
        return name, number


class TorchThreads(TorchCommunicator):
    """The real ``TorchCommunicator``, that has not started Horovod."""

    def __init__(self, rank: int, board: Board, host: str = "here") -> None:
        self.hvd = ThreadHvd(rank, board)
        self.lost = ()
        self.rank = self.local_rank = rank
        self.size = board.size
        self.host = host
        self.waiting_since_s = self.waiting_in = None
        self.log = CollectiveLog()
        self.at_close = ExitStack()
        self._board = board

    def split(self, groups: Any) -> TorchThreads:
        mine = next(tuple(group) for group in groups if self.rank in group)
        return TorchThreads(mine.index(self.rank), self._board.part(mine), self.host)


def on_torch_ranks(size: int, function: Callable[[TorchThreads], Any]) -> list[Any]:
    """Call a function once per rank, in threads; return results by rank, errors as values."""
    return on_ranks(size, function, TorchThreads)


def run_of(
    world: Any, fields: dict[str, Any], *, data: Any = None, **more: Any
) -> tuple[TorchFramework, Run]:
    """A run of a job on this rank, ready to begin, with rank 0's weights; data: ranks that share samples."""
    framework = TorchFramework()
    mesh = Mesh(world, data or world)
    job = for_ranks(Job.model_validate({**fields, **more}), mesh.data.size)
    replica, train_reader, eval_reader = framework.prepare(job, mesh)
    replica.broadcast()
    return framework, make_run(job, mesh, replica, train_reader, eval_reader)


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])
