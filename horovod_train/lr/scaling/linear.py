"""Linear scaling: the rate is proportional to the batch, so that k samples move the weights equally far.

Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677.
"""

from __future__ import annotations

from horovod_train.lr.scaling.base import Scaled


def linear(k: float) -> Scaled:
    """Return rate x k.

    >>> linear(4.0).rate
    4.0
    """
    return Scaled(rate=k)
