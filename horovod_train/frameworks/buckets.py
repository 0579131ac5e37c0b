"""Which gradients travel together.

A bucket is one flat piece of memory and one all-reduce. The layout follows from the order, types and
sizes of the gradients alone, so the order of every addition is the same in every run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def plan_buckets(kinds: Sequence[Hashable], sizes_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Return the members of each bucket, by their places; the last gradient comes first.

    Backward makes gradients from the last layer to the first, so buckets fill in about this order.

    Args:
        kinds: What the members of a bucket have in common, such as (type, device).
        sizes_bytes: Size of each gradient.
        limit_bytes: A bucket that has reached this size takes no more.

    >>> plan_buckets(["a", "a", "a", "b"], [10, 10, 10, 10], 20)
    [[3], [2, 1], [0]]
    """
    buckets: list[list[int]] = []
    filled_bytes = 0
    for place in reversed(range(len(kinds))):
        if not buckets or kinds[buckets[-1][0]] != kinds[place] or filled_bytes >= limit_bytes:
            buckets.append([])
            filled_bytes = 0
        buckets[-1].append(place)
        filled_bytes += sizes_bytes[place]
    return buckets
