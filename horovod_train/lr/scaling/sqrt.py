"""Square-root scaling: the variance of an update, (rate^2) x (gradient variance / batch), is constant.

Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997.
"""

from __future__ import annotations

import math

from horovod_train.lr.scaling.base import Scaled


def square_root(k: float) -> Scaled:
    """Return rate x the square root of k.

    >>> square_root(4.0).rate
    2.0
    """
    return Scaled(rate=math.sqrt(k))
