"""The outer optimizer of local SGD: the update between two averaging steps is its gradient.

    change  = weights after the last mean - mean of the ranks' weights now
    m       = momentum * m + change
    weights = weights after the last mean - lr * (change + momentum * m)     (without nesterov: - lr * m)

With ``lr: 1`` and no momentum the weights become their mean. Source: Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", arXiv:2311.08105, who take lr 0.7 and Nesterov's momentum 0.9;
without Nesterov: Wang et al., "SlowMo", arXiv:1910.00643.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Outer:
    """Makes a step of all ranks out of the mean of their weights.

    Args:
        lr: Of the outer steps.
        momentum: Of the outer steps.
        nesterov: Nesterov's momentum.
    """

    def __init__(self, *, lr: float, momentum: float, nesterov: bool) -> None:
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov
        self._before: dict[str, torch.Tensor] = {}
        self.momenta: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def record(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Note the weights from which ranks start; once after each mean."""
        if not self._before:
            self._before = {name: weight.detach().clone() for name, weight in weights.items()}

    def step(self, name: str, mean: torch.Tensor) -> torch.Tensor:
        """Return what a weight becomes, given the mean of all ranks'; in the mean's type."""
        if name not in self._before:  # it was not trained yet when they were noted
            return mean
        before = self._before.pop(name).to(mean.dtype)
        change = before - mean
        momentum = self.momenta.get(name)
        momentum = change if momentum is None else self._momentum * momentum.to(mean.dtype) + change
        self.momenta[name] = momentum
        return before - self._lr * (change + self._momentum * momentum if self._nesterov else momentum)

    def reset(self) -> None:
        """Ranks start from other weights than those that were noted."""
        self._before = {}
