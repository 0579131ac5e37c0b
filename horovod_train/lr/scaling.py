r"""Scaling rules: how the learning rate and related settings follow the global batch.

A rule is a function of ``k`` = global batch / reference batch, and returns a ``Scaled``. A rule of another
package (entry point ``horovod_train.scalings``) or of a file (``lr.scaling: file.py:rule``) may return the
factor of the rate alone.
"""

from __future__ import annotations

import math

from horovod_train.config.optimization import Scaled


def linear(k: float) -> Scaled:
    """Return rate x k, so that k samples move the weights equally far.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677.

    >>> linear(4.0).rate
    4.0
    """
    return Scaled(rate=k)


def square_root(k: float) -> Scaled:
    """Return rate x sqrt(k): the variance of an update, (rate^2) x (gradient variance / batch), is constant.

    Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997.

    >>> square_root(4.0).rate
    2.0
    """
    return Scaled(rate=math.sqrt(k))


def unscaled(k: float) -> Scaled:
    """Return the unchanged rate: it was tuned for the global batch of the job.

    >>> unscaled(4.0).rate
    1.0
    """
    del k
    return Scaled(rate=1.0)


def legw(k: float) -> Scaled:
    """Return rate x sqrt(k), warm-up epochs x k (linear-epoch gradual warm-up).

    The warm-up has the same number of steps for each batch, because an epoch has k times fewer steps.

    Source: You et al., "Large-Batch Training for LSTM and Beyond", arXiv:1901.08256.

    >>> legw(4.0).rate, legw(4.0).warmup
    (2.0, 4.0)
    """
    return Scaled(rate=math.sqrt(k), warmup=k)


def adam_sqrt(k: float) -> Scaled:
    """Return the factors of rate, 1 - beta and epsilon for Adam: sqrt(k), k and 1 / sqrt(k).

    Adam with these settings approximates the same stochastic differential equation for each batch. The rule
    requires k (1 - beta1) < 1: for beta1 = 0.9, k < 10.

    Source: Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms",
    arXiv:2205.10287.

    >>> adam_sqrt(4.0)
    Scaled(rate=2.0, warmup=1.0, one_minus_beta=4.0, epsilon=0.5, follows_gain=False)
    """
    return Scaled(rate=math.sqrt(k), one_minus_beta=k, epsilon=1 / math.sqrt(k))


def adascale(k: float) -> Scaled:
    r"""Return the largest possible factor, k: the rate is multiplied by a measured gain between 1 and k.

    .. code-block:: text

        S = reference batch x variance of the reference batch's gradient = trace of the per-sample covariance
        gain = (S / reference batch + |G|^2) / (S / batch + |G|^2)      G: the expected gradient

    A step on the large batch counts as ``gain`` steps on the reference batch: the schedule follows this
    scale-invariant progress, and training ends when the progress reaches ``train.epochs``. It therefore uses
    about k / gain times as many samples, at most k times. If gradients are mostly noise, the gain is k, as
    under linear scaling; if they have no noise, it is 1.

    Source: Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training",
    arXiv:2007.05105.

    >>> adascale(4.0).rate, adascale(4.0).follows_gain
    (4.0, True)
    """
    return Scaled(rate=k, follows_gain=True)


def gain(covariance: float, square_norm: float, batch: float, reference_batch: float) -> float:
    """Return the gain of a batch over the reference batch, between 1 and their ratio (see ``adascale``).

    Args:
        covariance: Trace of the covariance of the gradient of one sample.
        square_norm: Square of the norm of the expected gradient.
        batch: Samples per step.
        reference_batch: Samples per step for which the base rate was tuned.

    >>> gain(covariance=32.0, square_norm=1.0, batch=128, reference_batch=32)
    1.6
    >>> gain(0.0, 1.0, 128, 32), gain(1.0, 0.0, 128, 32)
    (1.0, 4.0)
    """
    k = batch / reference_batch
    if k <= 1:
        return k  # a smaller batch than the reference: linear scaling
    covariance, square_norm = max(covariance, 0.0), max(square_norm, 0.0)
    if covariance == square_norm == 0.0:
        return 1.0
    small, large = covariance / reference_batch + square_norm, covariance / batch + square_norm
    return min(max(small / large, 1.0), k)
