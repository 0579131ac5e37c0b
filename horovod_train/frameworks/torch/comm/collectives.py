"""Collectives on PyTorch tensors: through Horovod's PyTorch binding, or in a single process.

TorchCommunicator   the ranks of a job, through Horovod's PyTorch binding
ProcessSet          the ranks of a Horovod process set
TorchSingleRank     a single process: collectives return their input
Exchange            sums of tensors over ranks, after the backward pass
mpi                 MPI in addition to Horovod, through mpi4py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from horovod_train.collectives.base import Collective, Communicator, SingleRank, Waiting, allgather_json
from horovod_train.collectives.horovod import Array, HorovodCommunicator
from horovod_train.errors import UserError
from horovod_train.frameworks import exchange
from horovod_train.system.machine import usable_cores

Result = TypeVar("Result")
PROCESS_SETS: dict[tuple[int, ...], Any] = {}
"""Horovod's process sets by their world ranks; Horovod refuses duplicates, so each is added only once."""


@runtime_checkable
class TensorCollectives(Communicator, Protocol):
    """A communicator that also has collectives on tensors.

    A collective is identified by its name: all ranks call it with the same name, shape and data type.
    """

    def start_allreduce(self, tensor: torch.Tensor, name: str) -> Any:
        """Start an in-place sum over ranks; returns immediately with a handle for ``wait``."""
        ...

    def start_allgather(self, tensor: torch.Tensor, name: str) -> Any:
        """Start an all-gather of flat tensors of equal length; returns a handle for ``wait``."""
        ...

    def start_reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Any:
        """Start a reduce-scatter (sum) of a flat tensor: each rank receives one part of the sum.

        A part has the length of ``into``, to which ``wait`` writes it. Returns immediately with a handle;
        the tensor is not modified, and must not be modified before ``wait`` returns.
        """
        ...

    def start_adasum(self, tensor: torch.Tensor, name: str) -> Any:
        """Start an in-place Adasum reduction over ranks; requires MPI."""
        ...

    @property
    def is_over_mpi(self) -> bool:
        """Whether Horovod uses MPI, and this communicator contains all ranks of the job."""
        ...

    def call_at_close(self, act: Callable[[], None]) -> None:
        """Register a function that ``close`` calls before it shuts down communication."""
        ...

    def is_done(self, handle: Any) -> bool:
        """Return whether ``wait`` would return immediately."""
        ...

    def wait(self, handle: Any) -> torch.Tensor:
        """Wait for a collective; return the sum, this rank's part of it, or all ranks' tensors in a row."""
        ...

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Overwrite a tensor, of any data type, with that of rank 0."""
        ...

    def split(self, groups: Sequence[Sequence[int]]) -> TensorCollectives:
        """Return a communicator for the group that contains this rank; ranks are numbered in ascending order.

        Collective: all ranks pass the same groups, which partition the ranks.
        """
        ...


class TorchSingleRank(SingleRank):
    """A single process: collectives return their input."""

    is_over_mpi = True  # a single rank does not communicate, so it needs no MPI

    def is_done(self, handle: torch.Tensor) -> bool:
        """Return True."""
        return True

    def call_at_close(self, act: Callable[[], None]) -> None:
        """Do nothing: a single rank has no communication to shut down."""

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
        """Copy the tensor to ``into``; return ``into``."""
        return into.copy_(tensor)

    def wait(self, handle: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return handle

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Do nothing."""

    def split(self, groups: Sequence[Sequence[int]]) -> TensorCollectives:
        """Return this communicator: the only group is this rank."""
        return self


class Started(NamedTuple):
    """A collective in flight; ``finish`` converts Horovod's output to the result (None: no conversion)."""

    handle: Any
    entry: Collective
    finish: Callable[[Any], torch.Tensor] | None = None


def tensor_communicator(ranks: Communicator) -> TensorCollectives:
    """Return ``ranks`` if it has tensor collectives, or else a ``TorchSingleRank``.

    Raises:
        TypeError: The communicator has several ranks, and belongs to another framework.
    """
    if isinstance(ranks, TensorCollectives):
        return ranks
    if ranks.size > 1:
        raise TypeError(f"{type(ranks).__name__} does not exchange PyTorch's tensors")
    return TorchSingleRank(host=ranks.host)


def sum_over(ranks: TensorCollectives, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor's sum over ranks; the tensor may be overwritten."""
    return ranks.wait(ranks.start_allreduce(tensor, name))


def broadcast_model(model: torch.nn.Module, ranks: Communicator) -> None:
    """Overwrite a model's parameters and buffers with those of rank 0. Collective.

    Raises:
        UserError: The models of the ranks have different parameters or buffers.
    """
    if ranks.size == 1:
        return
    tensors = model.state_dict()
    layout = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    for rank, other in enumerate(allgather_json(ranks, layout)):
        if other != layout:
            differing = sorted(set(other) ^ set(layout))
            raise UserError(
                f"rank {rank} and rank {ranks.rank} have different models: {differing[:2]}",
                hint="a model must not depend on the rank or on its part of the data",
            )
    together = tensor_communicator(ranks)  # once: the isinstance check of a Protocol is slow
    for name, tensor in tensors.items():
        if not tensor.is_meta:  # each rank loads meta tensors from a file
            together.broadcast(tensor, f"horovod_train.model.{name}")


class TorchCommunicator(HorovodCommunicator):
    """Communicator of a job's ranks through Horovod's PyTorch binding."""

    BINDING = "torch"
    _among: Mapping[str, Any] = MappingProxyType({})
    """Keyword arguments of Horovod's collectives that select a process set; empty: the global one."""
    _root = 0
    """World rank of this communicator's rank 0."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        if "OMP_NUM_THREADS" not in os.environ:
            share_cores(self.hvd.local_size())

    def allreduce_array(self, array: Array, name: str) -> Array:
        tensor = torch.from_numpy(array)
        self.hvd.synchronize(self.hvd.allreduce_async_(tensor, name=name, op=self.hvd.Sum, **self._among))
        return array

    def allgather_arrays(self, array: Array, name: str) -> Array:
        joined: Array = self.hvd.allgather(torch.tensor(array), name=name, **self._among).numpy()
        return joined

    def start_allreduce(self, tensor: torch.Tensor, name: str) -> Any:
        """Start an in-place sum over ranks; returns immediately."""
        return self._start_reduction(tensor, name, self.hvd.Sum)

    def start_adasum(self, tensor: torch.Tensor, name: str) -> Any:
        """Start an in-place Adasum reduction over ranks; returns immediately."""
        return self._start_reduction(tensor, name, self.hvd.Adasum)

    @property
    def is_over_mpi(self) -> bool:
        """Whether Horovod uses MPI, and this communicator contains all ranks of the job."""
        return bool(self.hvd.mpi_enabled()) and not self._among

    def call_at_close(self, act: Callable[[], None]) -> None:
        """Register a function that ``close`` calls before it shuts down communication."""
        self.at_close.callback(act)

    def _start_reduction(self, tensor: torch.Tensor, name: str, how: Any) -> Any:
        # Horovod does not support complex tensors; their real view is reduced instead.
        reals = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        entry = self.log.begin(name, size_bytes_of(reals))
        start = partial(self.hvd.allreduce_async_, reals, name=name, op=how, **self._among)
        return Started(self.wait_in(entry, start), entry)

    def start_allgather(self, tensor: torch.Tensor, name: str) -> Any:
        """Start an all-gather of flat tensors of equal length; returns immediately."""
        entry = self.log.begin(name, size_bytes_of(tensor))
        start = partial(self.hvd.allgather_async, tensor, name=name, **self._among)
        return Started(self.wait_in(entry, start), entry)

    def start_reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Any:
        """Start a reduce-scatter (sum) of a flat tensor; returns immediately.

        On CPUs, an all-to-all distributes the parts, and each rank sums the contributions to its own part in
        rank order, because Horovod's reduce-scatter is slower than its all-reduce (over Gloo, four times).
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
        """Return whether ``wait`` would return immediately."""
        return bool(self.hvd.poll(handle.handle))

    def wait(self, handle: Any) -> torch.Tensor:
        """Wait for a collective; return the sum, this rank's part of it, or all ranks' tensors in a row."""
        found = self.wait_in(handle.entry, partial(self.hvd.synchronize, handle.handle))
        if isinstance(found, torch.Tensor):
            let_stream_follow(found)
        handle.entry.ended_s = monotonic()
        result: torch.Tensor = found if handle.finish is None else handle.finish(found)
        return result

    def split(self, groups: Sequence[Sequence[int]]) -> TensorCollectives:
        """Return a communicator for this rank's group; each group becomes a Horovod process set."""
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
        super().close()
        if not self.hvd.is_initialized():  # shutdown removes the process sets
            PROCESS_SETS.clear()

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Overwrite a tensor, of any data type, with that of rank 0."""
        # Broadcast as bytes, because Horovod does not support all data types (bfloat16, bool).
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
    """Communicator of a Horovod process set: ``ranks`` of ``world`` in ascending order, with this rank."""

    def __init__(self, world: TorchCommunicator, ranks: Sequence[int], process_set: Any) -> None:
        self.hvd, self.lost, self.log, self.at_close = world.hvd, world.lost, world.log, world.at_close
        self.host, self.local_rank = world.host, world.local_rank
        self.rank, self.size = list(ranks).index(world.rank), len(ranks)
        self._world = world
        self.waiting_since_s, self.waiting_in = None, None  # recorded by the world
        self._among, self._root = {"process_set": process_set}, ranks[0]

    def wait_in(self, entry: Waiting, blocking: Callable[[], Result]) -> Result:
        """Call a blocking function; the communicator of all ranks records the collective and start time."""
        return self._world.wait_in(entry, blocking)

    def close(self) -> None:
        """Do nothing: the communicator of all ranks shuts down communication."""


def let_stream_follow(result: torch.Tensor) -> None:
    """Make the current CUDA stream wait for a collective that Horovod has enqueued.

    Horovod synchronizes only the default stream, because its callback runs in its own thread.
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
    """Limit this rank's threads to its part of the host's cores, to avoid oversubscription.

    This is for ranks started by ``horovodrun``; ``horovod-train run`` sets OMP_NUM_THREADS instead.
    """
    torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cores() // num_ranks)))


def mpi() -> ModuleType:
    """Import and return mpi4py's ``MPI``; the import initializes MPI, unless Horovod has done so already."""
    from mpi4py import MPI

    return MPI


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation type: float32 for floating-point types below 32 bits."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass
class Exchange(exchange.Exchange):
    """Sums lists of tensors over ranks."""

    _ranks: TensorCollectives = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = tensor_communicator(self.world)  # once: the isinstance check of a Protocol is slow

    sum = torch.no_grad()(exchange.Exchange.sum)

    @torch.no_grad()
    def mean(self, arrays: Sequence[torch.Tensor], name: str = "gradients") -> list[torch.Tensor]:
        """Return the elementwise means over ranks; see ``sum``."""
        sums = self.sum(arrays, name)
        if self.world.size > 1:
            for total in sums:
                total.div_(self.world.size)  # in place: allocation is slower than the division
        return sums

    def dense(self, array: torch.Tensor) -> torch.Tensor:
        return array.to_dense() if array.is_sparse and self.world.size > 1 else array

    def kind(self, array: torch.Tensor) -> tuple[torch.dtype, torch.device]:
        is_float32 = array.dtype == torch.float32
        return (self.wire_dtype or torch.float32) if is_float32 else wide_type(array.dtype), array.device

    def size_on_wire_bytes(self, array: torch.Tensor) -> int:
        return array.numel() * self.kind(array)[0].itemsize

    def pack(self, arrays: Sequence[torch.Tensor], kind: tuple[torch.dtype, torch.device]) -> torch.Tensor:
        """Return one flat tensor in the wire dtype with the elements of all tensors."""
        flat = [array.reshape(-1).to(kind[0]) for array in arrays]
        return torch.cat(flat) if len(flat) > 1 else flat[0]

    def reduce(self, buckets: Iterable[torch.Tensor], names: Iterable[str]) -> Iterator[torch.Tensor]:
        """Start the all-reduce of each bucket when it is packed; yield the sums."""
        started = [
            (bucket, self._ranks.start_allreduce(bucket, name))
            for bucket, name in zip(buckets, names, strict=False)
        ]
        for bucket, handle in started:
            before = perf_counter()
            self._ranks.wait(handle)
            self.seconds += perf_counter() - before
            yield bucket

    def unpack(self, total: torch.Tensor, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parts of a summed bucket in the types and shapes of its tensors."""
        parts = torch.split(total, [array.numel() for array in arrays])
        return [p.view(a.shape).to(a.dtype) for p, a in zip(parts, arrays, strict=True)]
