"""The norm of gradients, as exact on a CPU as it is on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils import get_total_norm


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all numbers of all gradients, shape [].

    On a CPU squares are summed in 64 bits. PyTorch sums them one after the other in the gradients' type; the
    result is off by 1e-5 to 4e-4 for a weight of a million numbers, and ranks that hold parts of weights
    would clip differently from one that holds all. GPUs sum in a tree.
    """
    if not gradients:
        return torch.zeros(())
    if gradients[0].device.type != "cpu":
        return get_total_norm(gradients)
    real = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]
    norms = torch._foreach_norm(real, 2, dtype=torch.float64)  # noqa: SLF001  (as get_total_norm does)
    return torch.linalg.vector_norm(torch.stack(norms))
