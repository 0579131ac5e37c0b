"""``horovod_train.gather``: tensors of all ranks in a loss that compares samples with each other.

A loss with in-batch negatives (SimCLR, CLIP) is no mean over samples: a rank that sees only its own samples
has fewer negatives than one process. With the samples of all ranks, each rank computes the loss of the joint
micro-batch. The gradient of a gathered tensor is summed over ranks, and each rank continues with its rows:

    loss of the step      sum over r of share[r] * L[r]
    gradient of rank r    (sum over s of share[s] * dL[s] / de[r]) * de[r] / dw

with share[r] = samples of rank r / samples of all ranks. The sum over ranks is the gradient of one process,
whether L[s] is the loss of all samples, or that of the own samples compared with all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from horovod_train.collectives.base import Communicator
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import (
    TensorCollectives,
    TorchSingleRank,
    sum_over,
    tensor_communicator,
)
from horovod_train.frameworks.torch.strategies.base import Strategy


@dataclass(frozen=True)
class Gathering:
    """Which ranks' rows are joined.

    Attributes:
        ranks: The data-parallel ranks; None: the strategy does not sum gradients over ranks in each step.
        of: Numbers of the ranks whose rows this rank gets; None: of all.
        is_counted: Whether this rank's micro-batch is counted; False: other ranks do not get its rows.
    """

    ranks: TensorCollectives | None
    of: range | None = None
    is_counted: bool = True


UNCHANGED = Gathering(TorchSingleRank())
"""``gather`` returns the tensor, as in one process."""

_gathering: ContextVar[Gathering | None] = ContextVar("gathering", default=None)


@contextmanager
def gathering(over: Gathering | None) -> Iterator[None]:
    """Let ``gather`` join tensors in the block, which contains forward pass and loss."""
    before = _gathering.set(over)
    try:
        yield
    finally:
        _gathering.reset(before)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in the order of ranks, with the gradient of one process.

    To be called on all ranks, in the loss of a task or in the model of a job. In an evaluation and with one
    rank, the tensor is returned unchanged.

    Args:
        tensor: Shape [samples of this rank, ...]; sizes but the first are equal on all ranks.

    Returns:
        Shape [samples of all ranks, ...].

    Raises:
        UserError: The strategy does not sum gradients over ranks in each step, the tensor has no dimension, a
            CUDA graph is recorded, or it is called in a loop of the user's own.
    """
    over = _gathering.get()
    if over is None:
        if torch.is_grad_enabled() and tensor.requires_grad and _is_one_of_several():
            raise UserError(
                "horovod_train.gather is called outside of the loss of a job's task",
                hint="train with a job (horovod-train run), or use the collectives of your loop's framework",
            )
        return tensor
    if over.ranks is None:
        raise UserError(
            "horovod_train.gather: this strategy does not sum the gradients of ranks in each step",
            hint="use strategy: allreduce, zero, ddp or fsdp",
        )
    if over.ranks.size == 1:
        return tensor
    if not tensor.dim():
        raise UserError(
            "horovod_train.gather: the tensor has no dimension",
            hint="pass a tensor with one row per sample, shape [samples, ...]",
        )
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UserError(
            "horovod_train.gather: a CUDA graph cannot contain it", hint="set train.cuda_graph: false"
        )
    if tensor.is_complex():
        return torch.view_as_complex(_Gather.apply(torch.view_as_real(tensor.resolve_conj()), over))  # type: ignore[no-untyped-call]
    joined: torch.Tensor = _Gather.apply(tensor, over)  # type: ignore[no-untyped-call]
    return joined


def _is_one_of_several() -> bool:
    hvd = sys.modules.get("horovod.torch")
    return hvd is not None and hvd.is_initialized() and hvd.size() > 1


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, over: Gathering) -> torch.Tensor:
        assert over.ranks is not None
        rank, size = over.ranks.rank, over.ranks.size
        lengths = torch.zeros(size, dtype=torch.int64, device=tensor.device)
        lengths[rank] = len(tensor) if over.is_counted else 0
        ends = [0, *sum_over(over.ranks, lengths, "horovod_train.gather.lengths").cumsum(0).tolist()]
        ctx.over, ctx.total, ctx.num_own = over, ends[-1], len(tensor)
        ctx.own = slice(ends[rank], ends[rank + 1])
        of = range(size) if over.of is None else over.of
        ctx.wanted = slice(ends[of.start], ends[of.stop])
        joined = _sum_of(over, tensor[: ends[rank + 1] - ends[rank]], ctx.own, ends[-1], "rows")
        return joined[ctx.wanted].to(tensor.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = _sum_of(ctx.over, gradient, ctx.wanted, ctx.total, "gradient")[ctx.own]
        if len(summed) == ctx.num_own:
            return summed, None
        return gradient.new_zeros((ctx.num_own, *gradient.shape[1:])), None  # its rows are not counted


def _sum_of(over: Gathering, part: torch.Tensor, place: slice, total: int, name: str) -> torch.Tensor:
    """Return the sum over ranks of parts at their places among ``total`` rows; the others are zero."""
    dtype = torch.uint8 if part.dtype == torch.bool else part.dtype
    rows = torch.zeros((total, *part.shape[1:]), dtype=dtype, device=part.device)
    rows[place] = part
    assert over.ranks is not None
    return sum_over(over.ranks, rows, f"horovod_train.gather.{name}")


def gathering_over(strategy: Strategy, data_ranks: Communicator) -> Gathering:
    """Return the gathering over the data-parallel ranks, if the strategy sums gradients over them."""
    is_exact = strategy.capabilities.sums_gradients or data_ranks.size == 1
    return Gathering(tensor_communicator(data_ranks) if is_exact else None)


def gathering_of(over: Gathering, share: float) -> Gathering:
    """Return the gathering for a micro-batch with this share of its step."""
    return over if share > 0 else replace(over, is_counted=False)
