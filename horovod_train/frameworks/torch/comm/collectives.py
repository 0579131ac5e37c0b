"""What ranks do together with tensors, in MPI's words: through Horovod's PyTorch binding, or alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from horovod_train.collectives.base import Communicator, SingleRank, allgather_json
from horovod_train.collectives.horovod import Array, HorovodCommunicator
from horovod_train.collectives.log import Collective, Waiting
from horovod_train.errors import UserError
from horovod_train.system.machine import usable_cores

Result = TypeVar("Result")
PROCESS_SETS: dict[tuple[int, ...], Any] = {}
"""Horovod's, by their ranks: it has each once, while it is up."""


@runtime_checkable
class TensorCollectives(Communicator, Protocol):
    """Ranks that exchange tensors besides numbers and bytes.

    Ranks know a tensor by its name: where one of them exchanges it, all do, with the same shape and type.
    """

    def start_allreduce(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to sum a tensor over ranks, in place; returns at once with what ``wait`` needs."""
        ...

    def start_allgather(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to gather flat tensors of the same length; returns at once with what ``wait`` needs."""
        ...

    def start_reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Any:
        """Begin to sum a flat tensor over ranks, each of which gets its part of the sum alone.

        Parts are as long as ``into``, where the sum is after ``wait``. Returns at once with what that needs;
        the tensor is left unchanged, and must be until then.
        """
        ...

    def start_adasum(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to join a tensor with those of other ranks by Adasum, in place; over MPI."""
        ...

    @property
    def is_over_mpi(self) -> bool:
        """Whether all ranks of the job are here, and talk over MPI."""
        ...

    def before_closing(self, act: Callable[[], None]) -> None:
        """Call something when this rank leaves the world."""
        ...

    def is_done(self, handle: Any) -> bool:
        """Return whether ``wait`` would return at once."""
        ...

    def wait(self, handle: Any) -> torch.Tensor:
        """Return when it is done: the sum, this rank's part of it, or the tensors of all ranks in a row."""
        ...

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Overwrite a tensor with rank 0's, whatever its type."""
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> TensorCollectives:
        """Return the ranks of the group that this rank is in, numbered in the group's order.

        Every rank calls it with the same groups, which together are all ranks.
        """
        ...


class TorchSingleRank(SingleRank):
    """A process alone: every sum is there already."""

    is_over_mpi = True

    def is_done(self, handle: torch.Tensor) -> bool:
        """Return that it is."""
        return True

    def before_closing(self, act: Callable[[], None]) -> None:
        """Do nothing: a single rank."""

    def start_adasum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def start_allreduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def start_allgather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def start_reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> torch.Tensor:
        """Copy the tensor, and return its copy."""
        return into.copy_(tensor)

    def wait(self, handle: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return handle

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Do nothing."""

    def split(self, groups: Sequence[Sequence[int]]) -> TensorCollectives:
        """Return this rank."""
        return self


class Started(NamedTuple):
    """A collective that has begun.

    Attributes:
        handle: Horovod's.
        entry: What is waited for.
        finish: Makes the result of what Horovod returns; None: it is the result.
    """

    handle: Any
    entry: Collective
    finish: Callable[[Any], torch.Tensor] | None = None


def with_tensors(ranks: Communicator) -> TensorCollectives:
    """Return ranks as ranks that exchange tensors: those of PyTorch's binding, or one alone.

    Raises:
        TypeError: They are several, of another framework.
    """
    if isinstance(ranks, TensorCollectives):
        return ranks
    if ranks.size > 1:
        raise TypeError(f"{type(ranks).__name__} does not exchange PyTorch's tensors")
    return TorchSingleRank(host=ranks.host)


def sum_over(ranks: TensorCollectives, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor's sum over ranks; it may be overwritten."""
    return ranks.wait(ranks.start_allreduce(tensor, name))


def broadcast_model(model: torch.nn.Module, ranks: Communicator) -> None:
    """Overwrite a model's parameters and buffers with rank 0's.

    Raises:
        UserError: Ranks have made different models.
    """
    if ranks.size == 1:
        return
    tensors = model.state_dict()
    layout = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    for rank, other in enumerate(allgather_json(ranks, layout)):
        if other != layout:
            differing = sorted(set(other) ^ set(layout))
            raise UserError(
                f"rank {rank} and rank {ranks.rank} have made different models: {differing[:2]}",
                hint="a model must not depend on the rank or on its part of the data",
            )
    together = with_tensors(ranks)  # once: it takes long compared with a broadcast
    for name, tensor in tensors.items():
        if not tensor.is_meta:  # each rank reads those from a file
            together.broadcast(tensor, f"horovod_train.model.{name}")


class TorchCommunicator(HorovodCommunicator):
    """The ranks of a job, through Horovod's PyTorch binding."""

    BINDING = "torch"
    _among: Mapping[str, Any] = MappingProxyType({})
    """Which of Horovod's process sets collectives are of; empty: all ranks."""
    _root = 0
    """The first of them, as Horovod numbers it."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        if "OMP_NUM_THREADS" not in os.environ:
            share_cores(self.hvd.local_size())

    def allreduce_array(self, array: Array, name: str) -> Array:
        """Return the elementwise sum over ranks."""
        tensor = torch.from_numpy(array)
        self.hvd.synchronize(self.hvd.allreduce_async_(tensor, name=name, op=self.hvd.Sum, **self._among))
        return array

    def allgather_arrays(self, array: Array, name: str) -> Array:
        """Return the arrays of all ranks, one after the other."""
        joined: Array = self.hvd.allgather(torch.tensor(array), name=name, **self._among).numpy()
        return joined

    def start_allreduce(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to sum a tensor over ranks, in place; returns at once."""
        return self._start_joining(tensor, name, self.hvd.Sum)

    def start_adasum(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to join a tensor with those of other ranks by Adasum, in place; returns at once."""
        return self._start_joining(tensor, name, self.hvd.Adasum)

    @property
    def is_over_mpi(self) -> bool:
        """Whether all ranks of the job are here, and talk over MPI."""
        return bool(self.hvd.mpi_enabled()) and not self._among

    def before_closing(self, act: Callable[[], None]) -> None:
        """Call something when this rank leaves the world."""
        self.at_close.callback(act)

    def _start_joining(self, tensor: torch.Tensor, name: str, how: Any) -> Any:
        # Horovod knows no complex numbers; pairs of reals are joined as they would be.
        reals = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        entry = self.log.begin(name, size_bytes_of(reals))
        start = partial(self.hvd.allreduce_async_, reals, name=name, op=how, **self._among)
        return Started(self.wait_in(entry, start), entry)

    def start_allgather(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to gather flat tensors of the same length; returns at once."""
        entry = self.log.begin(name, size_bytes_of(tensor))
        start = partial(self.hvd.allgather_async, tensor, name=name, **self._among)
        return Started(self.wait_in(entry, start), entry)

    def start_reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Any:
        """Begin to sum a flat tensor over ranks, each of which gets its part alone; returns at once.

        Horovod's reduce-scatter takes longer than its all-reduce on CPUs, over Gloo four times as long. There
        ranks send each other the parts, and each adds up its own, in the order of ranks.
        """
        entry = self.log.begin(name, size_bytes_of(tensor))
        if tensor.is_cuda:
            start = partial(self.hvd.reducescatter_async, tensor, name=name, op=self.hvd.Sum, **self._among)
            return Started(self.wait_in(entry, start), entry, into.copy_)
        lengths = torch.full((self.size,), len(into), dtype=torch.int32)
        start = partial(self.hvd.alltoall_async, tensor, lengths, name=name, **self._among)

        def add_up(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return torch.sum(found[0].view(self.size, len(into)), 0, out=into)

        return Started(self.wait_in(entry, start), entry, add_up)

    def is_done(self, handle: Any) -> bool:
        """Return whether ``wait`` would return at once."""
        return bool(self.hvd.poll(handle.handle))

    def wait(self, handle: Any) -> torch.Tensor:
        """Return when it is done: the sum, this rank's part of it, or the tensors of all ranks in a row."""
        found = self.wait_in(handle.entry, partial(self.hvd.synchronize, handle.handle))
        if isinstance(found, torch.Tensor):
            let_stream_follow(found)
        handle.entry.ended_s = monotonic()
        result: torch.Tensor = found if handle.finish is None else handle.finish(found)
        return result

    def split(self, groups: Sequence[Sequence[int]]) -> TensorCollectives:
        """Return the ranks of the group that this rank is in; Horovod makes a process set of each."""
        if len(groups) == 1:
            return self
        if len(groups) == self.size:
            return TorchSingleRank(host=self.host)
        for group in groups:
            if tuple(group) not in PROCESS_SETS:
                PROCESS_SETS[tuple(group)] = self.hvd.add_process_set(list(group))
        mine = next(tuple(group) for group in groups if self.rank in group)
        return ProcessSet(self, mine, PROCESS_SETS[mine])

    def close(self) -> None:
        """Leave the world. Safe to call twice."""
        super().close()
        if not self.hvd.is_initialized():  # as long as it is up, it has them
            PROCESS_SETS.clear()

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Overwrite a tensor with rank 0's, whatever its type."""
        # Horovod knows no bfloat16 and no bool; bytes are bytes.
        whole = tensor.detach().contiguous()
        view = whole.reshape(-1).view(torch.uint8)
        self.call(
            lambda: self.hvd.broadcast_(view, root_rank=self._root, name=name, **self._among),
            name,
            size_bytes_of(view),
        )
        let_stream_follow(view)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)


class ProcessSet(TorchCommunicator):
    """Some ranks of a job, as one of Horovod's process sets.

    Args:
        world: All ranks.
        ranks: Those of the set, this one among them, in the order in which the set numbers them.
        process_set: Horovod's.
    """

    def __init__(self, world: TorchCommunicator, ranks: Sequence[int], process_set: Any) -> None:
        self.hvd, self.lost, self.log, self.at_close = world.hvd, world.lost, world.log, world.at_close
        self.host, self.local_rank = world.host, world.local_rank
        self.rank, self.size = list(ranks).index(world.rank), len(ranks)
        self._world = world
        self.waiting_since_s, self.waiting_in = None, None  # all ranks know
        self._among, self._root = {"process_set": process_set}, ranks[0]

    def wait_in(self, entry: Waiting, blocking: Callable[[], Result]) -> Result:
        """Call what blocks; record what it waits for, and since when."""
        return self._world.wait_in(entry, blocking)

    def close(self) -> None:
        """Do nothing: all ranks are left together."""


def let_stream_follow(result: torch.Tensor) -> None:
    """Let this thread's work on a GPU come after a collective that Horovod has queued there.

    Horovod itself tells the default stream alone: its callback runs in its own thread.
    """
    if not result.is_cuda:
        return
    current, default = torch.cuda.current_stream(result.device), torch.cuda.default_stream(result.device)
    if current != default:
        current.wait_stream(default)


def size_bytes_of(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in bytes."""
    return tensor.numel() * tensor.element_size()


def share_cores(num_ranks: int) -> None:
    """Let the ranks of a host share its cores: with a thread per core each, they would fight for them.

    ``horovodrun`` does not see to it; ``horovod-train run`` sets OMP_NUM_THREADS instead.
    """
    torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cores() // num_ranks)))
