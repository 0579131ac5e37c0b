r"""AdaScale: the rate is multiplied by a gain between 1 and k, which is measured from the gradients.

.. code-block:: text

    S = reference batch x variance of the reference batch's gradient = trace of the per-sample covariance
    gain = (S / reference batch + |G|^2) / (S / batch + |G|^2)      G: the expected gradient

A step on the large batch counts as ``gain`` steps on the reference batch: the schedule follows this
scale-invariant progress, and training ends when the progress reaches ``train.epochs``. It therefore uses up
to k / gain times as many samples. If gradients are mostly noise, the gain is k, as under linear scaling; if
they have no noise, it is 1.

Source: Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", arXiv:2007.05105.
"""

from __future__ import annotations

from horovod_train.lr.scaling.base import Scaled


def adascale(k: float) -> Scaled:
    """Return the largest possible factor, k.

    >>> adascale(4.0).rate, adascale(4.0).follows_gain
    (4.0, True)
    """
    return Scaled(rate=k, follows_gain=True)


def gain(covariance: float, square_norm: float, batch: float, reference_batch: float) -> float:
    """Return the gain of a batch over the reference batch, between 1 and their ratio.

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
