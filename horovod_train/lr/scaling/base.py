"""The result of a scaling rule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scaled:
    """Factors by which settings of the reference batch are multiplied.

    Attributes:
        rate: Factor of the learning rate. If ``follows_gain``, the largest possible factor.
        warmup: Factor of the length of the warm-up, in epochs.
        one_minus_beta: Factor of 1 - beta, for the betas of Adam.
        epsilon: Factor of Adam's epsilon.
        follows_gain: The factor of the rate is the gain of AdaScale, which is measured in each step.
    """

    rate: float
    warmup: float = 1.0
    one_minus_beta: float = 1.0
    epsilon: float = 1.0
    follows_gain: bool = False
