"""Detection of slow ranks and slow phases, by the rule of the alert HorovodTrainStraggler (``rules.py``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from horovod_train.events.types import PHASES, WAIT_PHASE
from horovod_train.monitor.rank_series import Window

SLOWER_BY = 0.2
"""A rank is slow if its own time exceeds the median of all ranks by more than this fraction."""

MIN_WINDOW_S = 30.0
"""Minimum length of a window in which slow ranks are reported."""


@dataclass(frozen=True)
class Straggler:
    """Slow rank.

    Attributes:
        own_s: Own time of the rank per step.
        others_s: Median own time per step of the ranks that are not slow.
        phase: Phase with the largest difference; empty: unknown.
        excess_s: Difference in this phase, per step.
    """

    rank: int
    own_s: float
    others_s: float
    phase: str
    excess_s: float


def stragglers(window: Window) -> list[Straggler]:
    """Return the slow ranks in a window, the slowest first."""
    own = window.per_step(window.own_s)
    known = np.isfinite(own)
    if known.sum() < 2:
        return []
    median = float(np.median(own[known]))
    slow = np.flatnonzero(known & (own > (1 + SLOWER_BY) * median))
    others = known.copy()
    others[slow] = False
    usual_s = float(np.median(own[others]))
    found = [_explained(window, int(rank), float(own[rank]), usual_s, others) for rank in slow]
    return sorted(found, key=lambda each: -each.own_s)


def _explained(
    window: Window, rank: int, own_s: float, others_s: float, others: npt.NDArray[np.bool_]
) -> Straggler:
    """Compare each phase of a slow rank with the median of the ranks that are not slow."""
    excess: dict[str, float] = {}
    for phase in PHASES:
        if phase == WAIT_PHASE:
            continue
        per_step = window.per_step(window[phase])
        usual = per_step[others & np.isfinite(per_step)]
        if len(usual) and np.isfinite(per_step[rank]):
            excess[phase] = float(per_step[rank] - np.median(usual))
    phase = max(excess, key=excess.__getitem__, default="")
    return Straggler(rank, own_s, others_s, phase, excess.get(phase, 0.0))
