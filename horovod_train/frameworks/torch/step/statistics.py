"""Running statistics of normalization layers, which a forward pass changes even if the step is skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _NormBase

from horovod_train.frameworks.torch.comm.sync_batch_norm import SyncBatchNormMixin


class RunningStatistics:
    """Running means and variances of a model's normalization layers.

    Attributes:
        buffers: Those of the layers that normalize by the samples of their rank only.
        counts: Number of batches in the statistics of these layers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        layers = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._of_all_ranks = _present(
            b for m in layers if isinstance(m, SyncBatchNormMixin) for b in (m.running_mean, m.running_var)
        )
        self._counts_of_all = _present(
            m.num_batches_tracked for m in layers if isinstance(m, SyncBatchNormMixin)
        )
        layers = [module for module in layers if not isinstance(module, SyncBatchNormMixin)]
        self.buffers = _present(buffer for m in layers for buffer in (m.running_mean, m.running_var))
        self.counts = _present(module.num_batches_tracked for module in layers)
        self._before: list[torch.Tensor] = []
        self._has_copy = False

    @torch.no_grad()
    def begin(self, step: object = None) -> None:
        """Copy the statistics before a step, always to the same memory (CUDA graphs read fixed addresses)."""
        now = [_flat(kind) for kind in self._kinds()]
        if self._before:
            torch._foreach_copy_(self._before, now)
        else:
            self._before = now
        self._has_copy = True

    @torch.no_grad()
    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Restore the statistics that ``begin`` has copied, if the step was skipped."""
        if not self._has_copy or is_used is True:
            return
        for kind, before in zip(self._kinds(), self._before, strict=True):
            flat = torch.where(is_used, _flat(kind), before) if isinstance(is_used, torch.Tensor) else before
            pieces = torch.split(flat, [buffer.numel() for buffer in kind])
            shaped = [piece.view(buffer.shape) for piece, buffer in zip(pieces, kind, strict=True)]
            torch._foreach_copy_(kind, shaped)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore ``buffers`` and ``counts`` after the passes of the block."""
        before = [buffer.clone() for buffer in (*self.buffers, *self.counts)]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, old in zip((*self.buffers, *self.counts), before, strict=True):
                    buffer.copy_(old)

    def _kinds(self) -> list[list[torch.Tensor]]:
        kinds = ([*self.buffers, *self._of_all_ranks], [*self.counts, *self._counts_of_all])
        return [kind for kind in kinds if kind]


def _present(buffers: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [buffer for buffer in buffers if buffer is not None]


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    # Different types are promoted to the widest, so that the conversions in both directions are exact.
    return torch.cat([buffer.flatten() for buffer in buffers])
