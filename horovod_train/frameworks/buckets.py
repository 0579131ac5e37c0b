"""Which gradients travel together.

Small gradients are copied into one flat piece of memory, a bucket, and are one all-reduce: messages
cost. A large one travels alone, from where it lies: copying it would cost more than the message. The
layout follows from the order, types and sizes of the gradients alone, so the order of every addition
is the same in every run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

ALONE = 8  # a gradient of at least limit / ALONE is not copied


def plan_buckets(
    kinds: Sequence[Hashable], sizes_bytes: Sequence[int], limit_bytes: int, *, in_a_row: bool = False
) -> list[list[int]]:
    """Return the members of each bucket, by their places; the last gradient comes first.

    Backward makes gradients from the last layer to the first, so buckets fill in about this order.
    A bucket is sent when its last member is there; what travels alone does not end the one being filled.

    Args:
        kinds: What the members of a bucket have in common, such as (type, device).
        sizes_bytes: Size of each gradient.
        limit_bytes: A bucket that has reached this size takes no more.
        in_a_row: Buckets leave while backward runs: they hold gradients that are made one after the other,
            large ones too, which lie in their bucket.

    >>> plan_buckets(["a", "a", "b", "a"], [1, 1, 1, 1], 10)
    [[3, 1, 0], [2]]
    >>> plan_buckets(["a", "a", "a"], [1, 20, 1], 10)
    [[2, 0], [1]]
    >>> plan_buckets(["a", "a", "b", "a"], [1, 20, 1, 1], 10, in_a_row=True)
    [[3], [2], [1], [0]]
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}  # by kind: the bucket that takes more, its bytes
    for place in reversed(range(len(kinds))):
        size_bytes = sizes_bytes[place]
        if size_bytes * ALONE >= limit_bytes and not in_a_row:
            buckets.append([place])
            continue
        bucket, filled_bytes = filling.pop(kinds[place], ([], 0))
        if not bucket:
            buckets.append(bucket)
        if in_a_row:
            filling.clear()  # another kind ends the bucket before
        bucket.append(place)
        if filled_bytes + size_bytes < limit_bytes:
            filling[kinds[place]] = bucket, filled_bytes + size_bytes
    return buckets
