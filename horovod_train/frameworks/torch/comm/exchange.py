"""Sums of gradients over ranks after the backward pass, for frameworks that return all gradients at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from horovod_train.collectives.base import Communicator
from horovod_train.frameworks.buckets import plan_buckets
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives, with_tensors


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation type: float32 for floating-point types below 32 bits."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass
class Exchange:
    """Sums of lists of tensors over ranks, in buckets of about ``bucket_size_bytes``.

    Attributes:
        wire_dtype: Data type in which float32 tensors are sent.
        seconds: Total time spent waiting for collectives.
    """

    world: Communicator
    bucket_size_bytes: int = 8 * 2**20
    wire_dtype: torch.dtype = torch.float32
    seconds: float = field(default=0.0, init=False)
    _ranks: TensorCollectives = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = with_tensors(self.world)  # once: the isinstance check of a Protocol is slow

    @torch.no_grad()
    def sum(self, tensors: Sequence[torch.Tensor], name: str = "gradients") -> list[torch.Tensor]:
        """Return the elementwise sums over ranks, in the types and shapes of the tensors.

        Collective: all ranks pass tensors of equal shapes in the same order. Sums may overwrite the tensors.
        """
        if self.world.size == 1:
            return list(tensors)
        dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors]
        kinds = [(self._type_on_wire(tensor.dtype), tensor.device) for tensor in dense]
        sizes = [tensor.numel() * kind.itemsize for tensor, (kind, _) in zip(dense, kinds, strict=True)]
        plan = plan_buckets(kinds, sizes, self.bucket_size_bytes)
        waiting = []
        for number, places in enumerate(plan):
            flat = [dense[place].reshape(-1).to(kinds[place][0]) for place in places]
            packed = torch.cat(flat) if len(flat) > 1 else flat[0]
            waiting.append((packed, self._ranks.start_allreduce(packed, f"horovod_train.{name}.{number}")))
        sums = dense
        for places, (packed, handle) in zip(plan, waiting, strict=True):
            started = perf_counter()
            self._ranks.wait(handle)
            self.seconds += perf_counter() - started
            pieces = torch.split(packed, [dense[place].numel() for place in places])
            for place, piece in zip(places, pieces, strict=True):
                sums[place] = piece.view(dense[place].shape).to(dense[place].dtype)
        return sums

    @torch.no_grad()
    def mean(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the elementwise means over ranks; see ``sum``."""
        sums = self.sum(tensors)
        if self.world.size > 1:
            for total in sums:
                total.div_(self.world.size)  # in place: allocation is slower than the division
        return sums

    def bytes_on_wire(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the number of bytes that a rank passes to collectives to sum such tensors."""
        if self.world.size == 1:
            return 0
        return sum(tensor.numel() * self._type_on_wire(tensor.dtype).itemsize for tensor in tensors)

    def _type_on_wire(self, dtype: torch.dtype) -> torch.dtype:
        return self.wire_dtype if dtype == torch.float32 else wide_type(dtype)
