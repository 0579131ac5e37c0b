"""The norm of gradients, which is as accurate on a CPU as on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils import get_total_norm


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all elements of all gradients, shape [].

    On a CPU, squares are summed in 64 bits. PyTorch sums them sequentially in the gradients' type, with an
    error of 1e-5 to 4e-4 for a weight of a million elements. Ranks that store shards of weights would then
    clip differently from ranks that store whole weights. GPUs sum in a tree.
    """
    if not gradients:
        return torch.zeros(())
    if gradients[0].device.type != "cpu":
        return get_total_norm(gradients)
    real = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]
    norms = torch._foreach_norm(real, 2, dtype=torch.float64)  # noqa: SLF001  (as get_total_norm does)
    return torch.linalg.vector_norm(torch.stack(norms))
