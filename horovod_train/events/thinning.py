"""Thin out a curve: few points that show what all of them show, however long the run is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

PER_OCTAVE = 8
"""Number of intervals in which a position doubles, near the start; curves of training bend there."""
VISIBLE = 0.01
"""Fraction of a curve's range that can be seen."""


def places_to_keep(
    positions: Sequence[float], values: Sequence[Mapping[str, float | None]], max_points: int
) -> list[int]:
    """Return the places of at most ``max_points`` points (at least the first and the last one), ascending.

    The axis is divided into intervals of equal width, with narrower ones near 0. Each keeps its first point
    and, of each series, the smallest and the largest value, and both ends of its largest rise and fall. The
    width is the smallest power of two for which the points are few enough: if a curve that was thinned before
    is continued and thinned again, old and new parts have the same resolution.

    Args:
        positions: Position of each point on the axis. Where it decreases, another curve begins.
        values: Values of each point by series; None and numbers that are not finite are omitted.
        max_points: Largest number of points.
    """
    kept = list(range(len(positions)))
    if len(kept) <= max_points:
        return kept
    visible = {name: VISIBLE * (high - low) for name, (low, high) in _ranges(values).items()}
    span = (max(positions) - min(positions)) or 1.0
    width = 2.0 ** math.floor(math.log2(span / max_points))
    while len(kept) > max_points and width <= 2 * span:
        chosen = {kept[-1]}
        for interval in _intervals(kept, positions, width):
            chosen.update(_to_keep(interval, kept, values, visible))
        kept, width = [place for place in kept if place in chosen], 2 * width
    while len(kept) > max_points:  # very many short curves
        kept = [*kept[:-1:2], kept[-1]] if max_points > 1 and len(kept) > 2 else kept[-max_points:]
    return kept


def _ranges(values: Sequence[Mapping[str, float | None]]) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest value of each series."""
    found: dict[str, tuple[float, float]] = {}
    for each in values:
        for name, value in each.items():
            if value is not None and math.isfinite(value):
                low, high = found.get(name, (value, value))
                found[name] = min(low, value), max(high, value)
    return found


def _intervals(kept: Sequence[int], positions: Sequence[float], width: float) -> Iterator[range]:
    """Yield the numbers of the kept places in each interval."""
    start = 0
    ids = [_interval_of(positions[place], width) for place in kept]
    for number, (place, following) in enumerate(pairwise(kept), 1):
        if ids[number] != ids[number - 1] or positions[following] < positions[place]:
            yield range(start, number)
            start = number
    yield range(start, len(kept))


def _interval_of(position: float, width: float) -> tuple[float, float]:
    """Return width and number of the interval; intervals of a larger width consist of whole ones."""
    narrow = min(width, 2.0 ** math.floor(math.log2(max(position, 1.0) / PER_OCTAVE)))
    return narrow, position // narrow


def _to_keep(
    interval: range,
    kept: Sequence[int],
    values: Sequence[Mapping[str, float | None]],
    visible: Mapping[str, float],
) -> Iterator[int]:
    yield kept[interval.start]
    for name, limit in visible.items():
        finite = [
            (value, number)
            for number in range(max(0, interval.start - 1), interval.stop)
            if (value := values[kept[number]].get(name)) is not None and math.isfinite(value)
        ]
        inner = [each for each in finite if each[1] in interval]
        if inner:
            yield from (kept[number] for _, number in (min(inner), max(inner)))
        jumps = [(after[0] - before[0], before[1], after[1]) for before, after in pairwise(finite)]
        for jump, before, after in (min(jumps), max(jumps)) if jumps else ():
            if abs(jump) > limit:
                yield from (kept[before], kept[after])
