r"""The square-root scaling rule of Adam, with its corrections of beta and epsilon.

.. code-block:: text

    rate x sqrt(k)    1 - beta x k    epsilon / sqrt(k)

Adam with these settings approximates the same stochastic differential equation for each batch. The rule
requires k (1 - beta1) < 1: for beta1 = 0.9, k < 10.

Source: Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv:2205.10287.
"""

from __future__ import annotations

import math

from horovod_train.lr.scaling.base import Scaled


def adam_sqrt(k: float) -> Scaled:
    """Return the factors of rate, 1 - beta and epsilon.

    >>> adam_sqrt(4.0)
    Scaled(rate=2.0, warmup=1.0, one_minus_beta=4.0, epsilon=0.5, follows_gain=False)
    """
    return Scaled(rate=math.sqrt(k), one_minus_beta=k, epsilon=1 / math.sqrt(k))
