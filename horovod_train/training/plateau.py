"""Reduction of the learning rate when an evaluation metric no longer improves.

Metrics are equal on all ranks, so all ranks reduce the rate after the same evaluation. The rules are those of
PyTorch's ``ReduceLROnPlateau`` with an absolute threshold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from horovod_train.config.optimization import Plateau


@dataclass(frozen=True)
class PlateauState:
    """State of the reductions, which checkpoints contain.

    Attributes:
        factor: Product of all reductions.
        best: Best value of the metric; None: no finite value so far.
        num_without_improvement: Evaluations since ``best`` or the last reduction.
        cooldown: Number of next evaluations that are not counted.
    """

    factor: float = 1.0
    best: float | None = None
    num_without_improvement: int = 0
    cooldown: int = 0


def after_evaluation(state: PlateauState, rule: Plateau, value: float) -> PlateauState:
    """Return the state after an evaluation with this value of the metric.

    >>> rule = Plateau(metric="loss", mode="min", factor=0.5, patience=1)
    >>> state, factors = PlateauState(), []
    >>> for value in (1.0, 0.9, 0.9, 0.95, 0.8):
    ...     state = after_evaluation(state, rule, value)
    ...     factors.append(state.factor)
    >>> factors
    [1.0, 1.0, 1.0, 0.5, 0.5]
    """
    sign = 1 if rule.mode == "max" else -1
    is_better = math.isfinite(value) and (
        state.best is None or sign * value > sign * state.best + rule.min_delta
    )
    best = value if is_better else state.best
    num_bad = 0 if is_better else state.num_without_improvement + 1
    cooldown = state.cooldown
    if cooldown > 0:
        cooldown, num_bad = cooldown - 1, 0
    if num_bad <= rule.patience:
        return replace(state, best=best, num_without_improvement=num_bad, cooldown=cooldown)
    return PlateauState(max(state.factor * rule.factor, rule.min_factor), best, 0, rule.cooldown)
