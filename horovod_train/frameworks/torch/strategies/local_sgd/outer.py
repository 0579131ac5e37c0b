"""Outer optimizer of local SGD, whose gradient is the averaged update between two averaging steps.

    change  = weights after the last mean - mean of the ranks' weights now
    m       = momentum * m + change
    weights = weights after the last mean - lr * (change + momentum * m)     (without nesterov: - lr * m)

With ``lr: 1`` and no momentum, the weights become their mean. Source: Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", arXiv:2311.08105, with lr 0.7 and Nesterov momentum 0.9;
without Nesterov: Wang et al., "SlowMo", arXiv:1910.00643.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Outer:
    """SGD optimizer over the averaged weights, with momentum.

    Attributes:
        momenta: Momentum by parameter name.
    """

    def __init__(self, *, lr: float, momentum: float, nesterov: bool) -> None:
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov
        self._before: dict[str, torch.Tensor] = {}
        self.momenta: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def record(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Store a copy of the weights before the first local step after a mean; later calls do nothing."""
        if not self._before:
            self._before = {name: weight.detach().clone() for name, weight in weights.items()}

    def step(self, name: str, mean: torch.Tensor) -> torch.Tensor:
        """Return the new value of a weight, given its mean over ranks, in the data type of the mean."""
        if name not in self._before:  # the parameter was not trained when weights were stored
            return mean
        before = self._before.pop(name).to(mean.dtype)
        change = before - mean
        momentum = self.momenta.get(name)
        momentum = change if momentum is None else self._momentum * momentum.to(mean.dtype) + change
        self.momenta[name] = momentum
        return before - self._lr * (change + self._momentum * momentum if self._nesterov else momentum)

    def reset(self) -> None:
        """Discard the stored weights; called when other weights are loaded."""
        self._before = {}
