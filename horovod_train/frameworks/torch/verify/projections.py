"""Random projections of gradients, which are compared in place of copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from horovod_train.frameworks.torch.comm.exchange import wide_type

NUM_COMPONENTS = 256
"""Length of the projection of a gradient."""
_CHUNK = 2**16
"""Length of the sequence of signs, which is repeated; a multiple of ``NUM_COMPONENTS``."""
_NUM_CHUNKS = 16
"""Number of sequences that are processed at once: each operation takes its time."""


@dataclass(frozen=True)
class Gradient:
    """Loss and gradient of a step.

    Attributes:
        loss: Loss of the step.
        projected: Of this rank's part of each gradient and of each written weight, its projection, shape
            [``NUM_COMPONENTS``], and its sum of squares; by name.
        count: By what the sum of the loss was divided, up to a factor; None: the loss is a mean.
    """

    loss: float
    projected: Mapping[str, tuple[torch.Tensor, float]]
    count: float | None = None


def weighted_sum(gradients: Sequence[Gradient], weights: Sequence[float]) -> Gradient:
    """Return the weighted sum of gradients; sums of squares are upper limits.

    Losses that are a sum and a count have the weights of their counts.
    """
    counts = [each.count for each in gradients if each.count is not None]
    if len(counts) == len(gradients):
        weights = [count / (sum(counts) or 1.0) for count in counts]
    loss = sum(weight * each.loss for weight, each in zip(weights, gradients, strict=True))
    kept: dict[str, tuple[torch.Tensor, float]] = {}
    for weight, each in zip(weights, gradients, strict=True):
        for name, (components, square) in each.projected.items():
            before, largest = kept.get(name, (torch.zeros_like(components), 0.0))
            kept[name] = before + weight * components, max(largest, square)
    return Gradient(loss, kept)


@torch.no_grad()
def projected(gradient: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return a random projection of a gradient, shape [``NUM_COMPONENTS``], float64; and its sum of squares.

    Elements are multiplied by random signs, and added up in as many groups as there are components ("count
    sketch"; Charikar, Chen and Farach-Colton, 2002). The projection is linear in the gradient.
    """
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    flat = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    flat = flat.reshape(-1)
    signs = _signs(flat.device)
    sums = torch.zeros(NUM_COMPONENTS, dtype=torch.float64, device=flat.device)
    square = torch.zeros((), dtype=torch.float64, device=flat.device)
    padded = -(-len(flat) // NUM_COMPONENTS) * NUM_COMPONENTS
    length = min(_CHUNK, max(NUM_COMPONENTS, padded))
    for chunk in torch.split(flat, _CHUNK * _NUM_CHUNKS):
        wide = chunk.to(wide_type(chunk.dtype)).double()
        square += wide.dot(wide)
        rows = torch.nn.functional.pad(wide, (0, -len(wide) % length))
        signed = rows.view(-1, length) * signs[:length]
        sums += signed.view(-1, NUM_COMPONENTS).sum(0)
    return sums.cpu(), float(square)


@cache
def _signs(device: torch.device) -> torch.Tensor:
    generator = np.random.default_rng(0)
    return torch.from_numpy(generator.integers(0, 2, _CHUNK) * 2.0 - 1).to(device)
