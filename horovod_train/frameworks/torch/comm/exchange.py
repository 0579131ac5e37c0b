"""Sums of tensors over ranks, after the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from horovod_train.frameworks import exchange
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives, tensor_communicator


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
        """Return a dense tensor."""
        return array.to_dense() if array.is_sparse and self.world.size > 1 else array

    def kind(self, array: torch.Tensor) -> tuple[torch.dtype, torch.device]:
        """Return the wire dtype and the device."""
        is_float32 = array.dtype == torch.float32
        return (self.wire_dtype or torch.float32) if is_float32 else wide_type(array.dtype), array.device

    def size_on_wire_bytes(self, array: torch.Tensor) -> int:
        """Return the size of a tensor in its wire dtype."""
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
