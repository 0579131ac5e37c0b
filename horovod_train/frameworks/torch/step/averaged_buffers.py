"""Buffers that depend on the samples of a rank, and that are averaged over ranks after each step."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from horovod_train.collectives.base import Communicator
from horovod_train.data.planned_step import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.exchange import Exchange

FIELD = "train.average_buffers"


class AveragedBuffers:
    """Average, over the data-parallel ranks, of the buffers whose names match a pattern.

    A moving average of batch means (``b <- a * b + (1 - a) * mean``) then equals that of a single process
    with the joint batch.

    Raises:
        UserError: A pattern matches no buffer, or a buffer that has no mean (integers, for example).
    """

    def __init__(self, model: torch.nn.Module, patterns: Iterable[str], ranks: Communicator) -> None:
        self._modules = dict(model.named_modules())
        self._names = _fitting(model, patterns)
        self._exchange = Exchange(ranks)
        self._own_share = 0.0

    def begin(self, step: PlannedStep) -> None:
        """Begin a step: this rank's weight in the mean is its fraction of the samples."""
        self._own_share = step.share.local_share

    @torch.no_grad()
    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Set buffers to their mean over ranks, also after a skipped step."""
        if not self._names:
            return
        buffers = [self._buffer(name) for name in self._names]  # a forward pass may have replaced them
        sums = self._exchange.sum([buffer * self._own_share for buffer in buffers], "buffers")
        for buffer, total in zip(buffers, sums, strict=True):
            buffer.copy_(total)

    def _buffer(self, name: str) -> torch.Tensor:
        module, _, key = name.rpartition(".")
        found: torch.Tensor = getattr(self._modules[module], key)
        return found


def _fitting(model: torch.nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the names of the buffers that match a pattern, except meta tensors."""
    named = {name: buffer for name, buffer in model.named_buffers() if buffer is not None}
    found: dict[str, torch.Tensor] = {}
    for pattern in patterns:
        fitting = {name: buffer for name, buffer in named.items() if fnmatchcase(name, pattern)}
        if not fitting:
            names = list(named)
            raise UserError(
                f"{FIELD}: {pattern!r} matches no buffer",
                hint=f"buffers are {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
                if names
                else "there is none",
            )
        for name, buffer in fitting.items():
            if not (buffer.is_floating_point() or buffer.is_complex()):
                raise UserError(
                    f"{FIELD}: {name!r} is of {str(buffer.dtype).removeprefix('torch.')}, which has no mean",
                    hint="name buffers of floating point numbers",
                )
        found |= fitting
    return [name for name, buffer in found.items() if not buffer.is_meta]
