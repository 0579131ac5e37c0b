"""Thin out a curve: few points that show what all of them show, however long the run is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def places_to_keep(
    positions: Sequence[float], values: Sequence[Mapping[str, float | None]], max_points: int
) -> list[int]:
    """Return the places of at most ``max_points`` points (at least the first and the last one), ascending.

    The axis is divided into intervals of equal width, with narrower ones near 0. Each keeps its first point
    and, of each series, the smallest and the largest value, and both ends of its largest rise and fall. The
    width is the smallest power of two for which the points are few enough: if a curve that was thinned before
    is continued and thinned again, old and new parts have the same resolution. If intervals are of no use, as
    after a clock that was wrong, every n-th point is kept.

    Args:
        positions: Position of each point on the axis. Where it decreases, another curve begins.
        values: Values of each point by series; None and numbers that are not finite are omitted.
        max_points: Largest number of points.
    """
    if len(positions) <= max_points:
        return list(range(len(positions)))
    from horovod_train.events.intervals import places_of_intervals  # imports NumPy

    return places_of_intervals(positions, values, max_points)
