"""Intervals of a curve, and the points of each that show what all of them show, computed with NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

PER_OCTAVE = 8
"""Number of intervals in which a position doubles, near the start; curves of training bend there."""
VISIBLE = 0.01
"""Fraction of a curve's range that can be seen."""
MAX_SERIES = 8
"""Number of series whose extremes are kept: the first ones."""
MAX_POSITION = 2.0**53


def places_of_intervals(
    positions: Sequence[float], values: Sequence[Mapping[str, float | None]], max_points: int
) -> list[int]:
    """Return what ``file.places_to_keep`` returns for more than ``max_points`` points."""
    at = np.array([_valid(position) for position in positions])
    series = [_as_array(values, name) for name in _names(values)]
    kept = np.arange(len(at))
    span = float(np.ptp(at)) or 1.0
    width = 2.0 ** math.floor(math.log2(span / max_points))
    while len(kept) > max_points and width <= 2 * span:
        kept = kept[_chosen(at[kept], [(each[kept], limit) for each, limit in series], width)]
        width *= 2
    if len(kept) > max_points or 4 * len(kept) < max_points:
        every = -(-(len(at) - 1) // max(1, max_points - 1))
        kept = np.array([*range(0, len(at) - 1, every), len(at) - 1][-max_points:])
    return [int(place) for place in kept]


def _valid(position: float) -> float:
    """Return a position as a finite number; a damaged file may contain any."""
    if not -MAX_POSITION <= position <= MAX_POSITION:  # also for NaN
        return MAX_POSITION if position > 0 else 0.0
    return float(position)


def _names(values: Sequence[Mapping[str, float | None]]) -> Iterator[str]:
    """Yield the names of the first series."""
    return islice(dict.fromkeys(name for each in values for name in each), MAX_SERIES)


def _as_array(values: Sequence[Mapping[str, float | None]], name: str) -> tuple[np.ndarray, float]:
    """Return a series, NaN where it has no finite value, and the size of a change that can be seen."""
    found = np.array([math.nan if (value := each.get(name)) is None else _finite(value) for each in values])
    return found, VISIBLE * float(np.nanmax(found) - np.nanmin(found)) if np.isfinite(found).any() else 0.0


def _finite(value: float) -> float:
    return float(value) if -1e300 < value < 1e300 else math.nan


def _chosen(at: np.ndarray, series: Sequence[tuple[np.ndarray, float]], width: float) -> np.ndarray:
    """Return whether each point is kept, for intervals of a width."""
    # Intervals of a larger width consist of whole ones.
    narrow = np.minimum(width, 2.0 ** np.floor(np.log2(np.maximum(at, 1.0) / PER_OCTAVE)))
    number = at // narrow
    begins = np.ones(len(at), bool)
    begins[1:] = (number[1:] != number[:-1]) | (narrow[1:] != narrow[:-1]) | (at[1:] < at[:-1])
    interval = np.cumsum(begins)
    chosen = begins.copy()
    chosen[-1] = True
    for found, limit in series:
        chosen[_extremes(found, interval)] = True
        jumps = np.full(len(found), math.nan)
        jumps[1:] = np.diff(found)
        jumps[np.abs(jumps) <= limit] = math.nan
        after = _extremes(jumps, interval)
        chosen[after] = chosen[after - 1] = True
    return chosen


def _extremes(found: np.ndarray, interval: np.ndarray) -> np.ndarray:
    """Return the places of the smallest and the largest value of each interval that has values."""
    places = np.flatnonzero(np.isfinite(found))
    if not len(places):
        return places
    order = places[np.lexsort((found[places], interval[places]))]
    begins = np.flatnonzero(np.diff(interval[order], prepend=-1))
    return np.concatenate([order[begins], order[np.append(begins[1:], len(order)) - 1]])
