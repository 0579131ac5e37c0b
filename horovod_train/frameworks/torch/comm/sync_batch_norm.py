"""Batch normalization with the statistics of the joint batch, which contains the samples of all ranks.

Layers retain their names, weights and hooks; only their class is replaced by one with another ``forward``.
A rank whose micro-batch is not counted (it has fewer samples than other ranks) adds zeros to the sums.

For n samples and positions over all ranks, with mean m, variance v, e = 1 / sqrt(v + eps), x^ = (x - m) * e:

    y  = weight * x^ + bias
    dx = weight * e * (dy - sum(dy) / n - x^ * sum(dy * x^) / n)

where sums are over all ranks. Source: Ioffe and Szegedy, "Batch Normalization", arXiv:1502.03167.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from horovod_train.errors import UserError

Sum = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns the elementwise sum of a tensor over ranks; the name must be equal on all ranks."""
BATCH_NORM_CLASSES = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)
is_counted = True
"""Whether the current micro-batch is counted in the statistics."""


class SyncBatchNormMixin:
    """Batch normalization layer with the statistics of all ranks.

    Attributes:
        sum_over_ranks: Sums over the data-parallel ranks.
        sync_name: Prefix of the names of the layer's sums.
    """

    sum_over_ranks: Sum
    sync_name: str

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (PyTorch's name)
        """Normalize a micro-batch, shape [N, C, ...]."""
        uses_running = self.running_mean is not None or not torch.is_grad_enabled()
        if not self.training and uses_running:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        num, mean, variance, output = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.sum_over_ranks, self.sync_name, is_counted
        )
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._move_statistics(num, mean, variance)
        return output

    @torch.no_grad()
    def _move_statistics(self: Any, num: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics, identically on every rank."""
        factor: Any = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / self.num_batches_tracked.double()
        unbiased = variance * (num / (num - 1))
        for running, of_batch in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running * (1 - factor) + of_batch.to(running.dtype) * factor)


class AnyBatchNorm(_BatchNorm):
    """Replacement of PyTorch's ``SyncBatchNorm``, which ``DistributedDataParallel`` refuses on a CPU."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002  (PyTorch's name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class _Normalize(torch.autograd.Function):
    """Normalization; returns the number of values per channel, their mean and variance, and the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        sum_over_ranks: Sum,
        name: str,
        counts: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        axes = [dim for dim in range(x.dim()) if dim != 1]
        values = x.to(wide)
        own = torch.zeros(x.shape[1] + 1, dtype=wide, device=x.device)
        if counts:
            own[:-1] = values.sum(axes)
            own[-1] = x.numel() // x.shape[1]
        sums = sum_over_ranks(own, f"{name}.mean")
        num, mean = sums[-1], sums[:-1] / sums[-1]
        # A second sum, because E[x^2] - E[x]^2 cancels if the mean is large and the variance is small.
        centered = values - _shaped(mean, x)
        squares = centered.square().sum(axes) if counts else torch.zeros_like(mean)
        variance = sum_over_ranks(squares, f"{name}.variance") / num
        if float(num) < 2 and not x.is_cuda:
            raise ValueError(
                f"expected more than 1 value per channel when training, got {list(x.shape)} in all ranks"
            )
        inverse = (variance + eps).rsqrt()
        normalized = centered * _shaped(inverse, x)
        output = normalized
        if weight is not None:
            output = output * _shaped(weight.to(wide), x)
        if bias is not None:
            output = output + _shaped(bias.to(wide), x)
        ctx.save_for_backward(normalized, inverse, num, weight)
        ctx.sum_over_ranks, ctx.name, ctx.counts, ctx.has_bias = (
            sum_over_ranks,
            name,
            counts,
            bias is not None,
        )
        ctx.mark_non_differentiable(num, mean, variance)
        ctx.set_materialize_grads(False)
        return num, mean, variance, output.to(x.dtype)

    @staticmethod
    @once_differentiable  # a second derivative would omit the contribution of the statistics
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of input, weight and bias."""
        normalized, inverse, num, weight = ctx.saved_tensors
        dy = gradients[-1]
        axes = [dim for dim in range(normalized.dim()) if dim != 1]
        wide = torch.zeros_like(normalized) if dy is None else dy.to(normalized.dtype)
        own = torch.stack([wide.sum(axes), (wide * normalized).sum(axes)])
        sums = ctx.sum_over_ranks(own.clone(), f"{ctx.name}.backward") / num
        dx = wide
        if ctx.counts:
            dx = wide - _shaped(sums[0], wide) - normalized * _shaped(sums[1], wide)
        dx = dx * _shaped(inverse if weight is None else inverse * weight.to(inverse.dtype), wide)
        dweight = None if weight is None else own[1].to(weight.dtype)
        dbias = own[0].to(inverse.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        like = gradients[-1].dtype if dy is not None else dx.dtype
        return dx.to(like), dweight, dbias, None, None, None, None


def _shaped(per_channel: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return per_channel.view(1, -1, *[1] * (like.dim() - 2))


def set_counted(*, is_micro_batch_counted: bool) -> None:
    """Set whether the following micro-batches are counted in the statistics."""
    global is_counted  # noqa: PLW0603  (``forward`` has no argument for it)
    is_counted = is_micro_batch_counted


@contextmanager
def without_statistics() -> Iterator[None]:
    """Exclude the micro-batches of the block from the statistics."""
    set_counted(is_micro_batch_counted=False)
    try:
        yield
    finally:
        set_counted(is_micro_batch_counted=True)


def synchronize_batch_norm(model: torch.nn.Module, sum_over_ranks: Sum, *, every: bool, prefix: str) -> int:
    """Make layers of a model normalize with the statistics of all ranks; return the number of such layers.

    Args:
        model: The model.
        sum_over_ranks: Sums over the data-parallel ranks.
        every: Convert all batch normalization layers; False: only ``SyncBatchNorm`` of PyTorch and Horovod.
        prefix: Prefix of the names of the sums.

    Raises:
        UserError: A layer is of a derived class, which may override ``forward``.
    """
    num_found = 0
    for name, module in model.named_modules():
        is_synchronized = isinstance(module, torch.nn.SyncBatchNorm) or _is_of_horovod(module)
        if not isinstance(module, _BatchNorm) or not (every or is_synchronized):
            continue
        if type(module) not in BATCH_NORM_CLASSES and not _is_of_horovod(module):
            raise UserError(
                f"train.sync_batch_norm: {name!r} is a {type(module).__name__}, a derived class "
                "that may override forward",
                hint=f"use one of {', '.join(each.__name__ for each in BATCH_NORM_CLASSES)}",
            )
        base = AnyBatchNorm if is_synchronized else type(module)
        module.__class__ = type("SynchronizedBatchNorm", (SyncBatchNormMixin, base), {})
        module.sum_over_ranks, module.sync_name = sum_over_ranks, f"{prefix}.{name}"  # type: ignore[assignment]
        num_found += 1
    return num_found


def _is_of_horovod(module: torch.nn.Module) -> bool:
    return type(module).__module__ == "horovod.torch.sync_batch_norm"
