"""Running statistics of normalization layers: a forward pass changes them, also that of a step left out."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _NormBase


class RunningStatistics:
    """The running means and variances of a model.

    Attributes:
        buffers: They themselves.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.buffers: list[torch.Tensor] = [
            buffer
            for module in model.modules()
            if isinstance(module, _NormBase)
            for buffer in (module.running_mean, module.running_var)
            if buffer is not None
        ]
        self._before: torch.Tensor | None = None

    @torch.no_grad()
    def remember(self) -> None:
        """Note them as they are."""
        if self.buffers:
            self._before = self._flat()

    @torch.no_grad()
    def take_back(self, *, is_used: torch.Tensor | bool) -> None:
        """Where a step was not used, make them what was noted, if anything was."""
        if self._before is None or is_used is True:
            return
        flat = self._before
        if isinstance(is_used, torch.Tensor):
            flat = torch.where(is_used, self._flat(), flat)
        pieces = torch.split(flat, [buffer.numel() for buffer in self.buffers])
        shaped = [piece.view(buffer.shape) for piece, buffer in zip(pieces, self.buffers, strict=True)]
        torch._foreach_copy_(self.buffers, shaped)
        self._before = None

    def _flat(self) -> torch.Tensor:
        # Of different types, in the widest: nothing is rounded on the way there and back.
        return torch.cat([buffer.flatten() for buffer in self.buffers])
