"""``horovod_train.gather``: tensors of all ranks in a loss that compares samples with each other.

A loss with in-batch negatives (SimCLR, CLIP) is no mean over samples: a rank that sees only its own samples
has fewer negatives than one process. With the samples of all ranks, each rank computes the loss of the joint
micro-batch. The gradient of a gathered tensor is summed over ranks, and each rank continues with its rows:

    loss of the step      sum over r of share[r] * L[r]
    gradient of rank r    (sum over s of share[s] * dL[s] / de[r]) * de[r] / dw

with share[r] = samples of rank r / samples of all ranks. The sum over ranks is the gradient of one process,
whether L[s] is the loss of all samples, or the mean over the own samples, each compared with all.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from horovod_train.collectives.base import Communicator
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import sum_over, tensor_communicator
from horovod_train.frameworks.torch.strategies.base import Strategy

log = logging.getLogger(__name__)

Total = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns the sum of a tensor over the data-parallel ranks."""
NAME = "horovod_train.gather"
_active: dict[int, Gathering] = {}
"""The gathering of each thread that runs passes."""


class Gathering:
    """Joins rows of the data-parallel ranks in the passes of a replica.

    Args:
        strategy: Sums gradients over ranks.
        ranks: The data-parallel ranks.

    Attributes:
        of: Numbers of the ranks whose rows are joined; None: all.
        is_in_graphs: Whether passes may be recorded as CUDA graphs.
    """

    def __init__(self, strategy: Strategy, ranks: Communicator) -> None:
        self._strategy, self._ranks = strategy, ranks
        self.of: range | None = None
        self.is_in_graphs = False
        self._is_counted, self._is_in_pass = True, False
        self._num_micro_batches = 1
        self._has_warned = False
        self._joined: list[torch.Tensor] = []
        self.was_used = False

    def begin(self, step: PlannedStep) -> None:
        """Begin a step."""
        self._num_micro_batches = len(step)

    @contextmanager
    def passes(self, share: float) -> Iterator[None]:
        """Join rows in the block, which contains the forward and backward pass of a micro-batch.

        Args:
            share: Samples of the micro-batch / samples of the step; 0: other ranks do not get its rows.
        """
        self._is_counted, self._is_in_pass = share > 0, True
        with active(self):
            try:
                yield
            finally:
                self._is_in_pass = False
                self._joined.clear()

    def tied(self, loss: object) -> Any:
        """Return a loss whose backward pass includes the collectives of all gathered tensors.

        Otherwise, a rank whose loss does not depend on a gathered tensor would not join the sum of its
        gradient, in which the other ranks wait.

        Raises:
            UserError: The loss is a sum and a count: a sum over gathered rows would be counted as often as
                there are ranks.
        """
        joined = [each for each in self._joined if each.requires_grad]
        self._joined.clear()
        if joined and isinstance(loss, tuple):
            raise UserError(
                "the task's loss is a sum and a count, and uses horovod_train.gather: each rank would add "
                "the samples of all",
                hint="return the mean over the gathered rows, or over the rank's own rows",
            )
        if not joined or not isinstance(loss, torch.Tensor):
            return loss
        return _Tie.apply(loss, *joined)  # type: ignore[no-untyped-call]

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of the ranks; see ``gather``."""
        if not self._is_in_pass or self._ranks.size == 1:
            return tensor
        self._check(tensor)
        if tensor.is_complex():
            return torch.view_as_complex(self.rows(torch.view_as_real(tensor.resolve_conj())))
        joined: torch.Tensor = _Gather.apply(tensor, self, self._is_counted)  # type: ignore[no-untyped-call]
        self._joined.append(joined)
        self.was_used = True
        return joined

    def _check(self, tensor: torch.Tensor) -> None:
        if not self._strategy.capabilities.sums_gradients:
            raise UserError(
                "horovod_train.gather: this strategy does not sum the gradients of ranks in each step",
                hint="use strategy: allreduce (without a codec), zero, ddp, fsdp, deepspeed or mesh",
            )
        if self.is_in_graphs:
            raise UserError(
                "horovod_train.gather: a CUDA graph cannot contain it", hint="set train.cuda_graph: false"
            )
        if not tensor.dim():
            raise UserError(
                "horovod_train.gather: the tensor has no dimension",
                hint="pass a tensor with one row per sample, shape [samples, ...]",
            )
        if self._num_micro_batches > 1 and not self._has_warned and self._ranks.rank == 0:
            self._has_warned = True
            log.warning(
                "horovod_train.gather joins the samples of a micro-batch of all ranks, and this step has %d "
                "micro-batches: the loss compares other samples than with another number of ranks",
                self._num_micro_batches,
            )

    @property
    def place(self) -> tuple[int, int]:
        """This rank and the number of ranks."""
        return self._ranks.rank, self._ranks.size

    @property
    def total(self) -> Total:
        """Sums over ranks: with PyTorch's collectives if passes contain others of these."""
        return self._strategy.sum_in_pass or partial(sum_over, tensor_communicator(self._ranks))


@contextmanager
def active(gathering: Gathering) -> Iterator[None]:
    """Let ``gather`` use this gathering in the block; outside of passes, it returns its argument."""
    thread = threading.get_ident()
    before = _active.get(thread)
    _active[thread] = gathering
    try:
        yield
    finally:
        del _active[thread]
        if before is not None:
            _active[thread] = before


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, in the order of ranks, with the gradient of one process.

    To be called on all ranks, in the loss of a task or in the model of a job. In an evaluation and with one
    rank, the tensor is returned unchanged.

    Args:
        tensor: Shape [samples of this rank, ...]; sizes but the first are equal on all ranks.

    Returns:
        Shape [samples of all ranks, ...].

    Raises:
        UserError: The strategy does not sum gradients over ranks in each step, the tensor has no dimension,
            passes are recorded as CUDA graphs, or it is called outside of a job's passes on several ranks.
    """
    # Autograd runs the backward pass of a GPU, in which activations may be recomputed, in another thread.
    gathering = _active.get(threading.get_ident()) or (
        next(iter(_active.values())) if len(_active) == 1 else None
    )
    if gathering is not None:
        return gathering.rows(tensor)
    if _is_one_of_several():
        raise UserError(
            "horovod_train.gather is called outside of the passes of a job of framework: torch",
            hint="call it in the task's loss or in the model; a user's own loop or another framework has "
            "collectives of its own (Lightning: self.all_gather(..., sync_grads=True))",
        )
    return tensor


def _is_one_of_several() -> bool:
    hvd = sys.modules.get("horovod.torch")
    return hvd is not None and hvd.is_initialized() and hvd.size() > 1


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gathering: Gathering, is_counted: bool) -> torch.Tensor:
        rank, size = gathering.place
        total = ctx.total = gathering.total  # once: the isinstance check of a Protocol is slow
        lengths = torch.zeros(size, dtype=torch.int64, device=tensor.device)
        lengths[rank] = len(tensor) if is_counted else 0
        ends = [0, *total(lengths, f"{NAME}.lengths").cumsum(0).tolist()]
        ctx.length, ctx.num_own = ends[-1], len(tensor)
        ctx.own = slice(ends[rank], ends[rank + 1])
        of = range(size) if gathering.of is None else gathering.of
        ctx.wanted = slice(ends[of.start], ends[of.stop])
        own = tensor[: ends[rank + 1] - ends[rank]]
        return _sum_of(ctx, own, ctx.own, "rows")[ctx.wanted].to(tensor.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        summed = _sum_of(ctx, gradient, ctx.wanted, "gradient")[ctx.own]
        if len(summed) == ctx.num_own:
            return summed, None, None
        return gradient.new_zeros((ctx.num_own, *gradient.shape[1:])), None, None  # its rows do not count


def _sum_of(ctx: Any, part: torch.Tensor, place: slice, name: str) -> torch.Tensor:
    """Return the sum over ranks of parts at their places among all rows; the others are zero."""
    is_small = not part.is_floating_point() and part.element_size() < 4
    dtype = torch.int32 if is_small else part.dtype
    rows = torch.zeros((ctx.length, *part.shape[1:]), dtype=dtype, device=part.device)
    rows[place] = part.to(dtype)
    summed: torch.Tensor = ctx.total(rows, f"{NAME}.{name}")
    return summed


class _Tie(torch.autograd.Function):
    """Returns the first tensor; the gradient of the others is zero, and their backward pass is run."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *joined: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(each.shape, each.dtype) for each in joined]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=gradient.device) for shape, dtype in ctx.shapes)
        return (gradient, *zeros)
