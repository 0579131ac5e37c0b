"""LEGW (linear-epoch gradual warm-up): rate x sqrt(k), and a warm-up that is k times as many epochs long.

The warm-up has the same number of steps for each batch, because an epoch has k times fewer steps.

Source: You et al., "Large-Batch Training for LSTM and Beyond", arXiv:1901.08256.
"""

from __future__ import annotations

import math

from horovod_train.lr.scaling.base import Scaled


def legw(k: float) -> Scaled:
    """Return rate x sqrt(k), warm-up epochs x k.

    >>> legw(4.0).rate, legw(4.0).warmup
    (2.0, 4.0)
    """
    return Scaled(rate=math.sqrt(k), warmup=k)
