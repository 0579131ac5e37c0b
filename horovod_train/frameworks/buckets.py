"""Assignment of gradients to buckets.

Small gradients are copied into one contiguous buffer, a bucket, which one all-reduce sums, because each
message has a fixed cost. A large gradient is sent alone, from its own memory, because its copy would cost
more than the message. Buckets depend only on the order, dtypes and sizes of the gradients, so the order of
additions is the same in every run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

SEND_ALONE_FRACTION = 8  # a gradient of at least limit_bytes / SEND_ALONE_FRACTION is sent alone


def plan_buckets(
    kinds: Sequence[Hashable], sizes_bytes: Sequence[int], limit_bytes: int, *, contiguous: bool = False
) -> list[list[int]]:
    """Return the indices of the gradients of each bucket, in reverse order of the gradients.

    Backward computes gradients from the last layer to the first, so buckets are completed in about this
    order. A gradient that is sent alone does not close the bucket that is being filled.

    Args:
        kinds: Property that all gradients of a bucket have in common, such as (dtype, device).
        sizes_bytes: Size of each gradient.
        limit_bytes: Size at which a bucket is closed.
        contiguous: A bucket contains only consecutive gradients, including large ones, so that it can be sent
            while backward runs.

    >>> plan_buckets(["a", "a", "b", "a"], [1, 1, 1, 1], 10)
    [[3, 1, 0], [2]]
    >>> plan_buckets(["a", "a", "a"], [1, 20, 1], 10)
    [[2, 0], [1]]
    >>> plan_buckets(["a", "a", "b", "a"], [1, 20, 1, 1], 10, contiguous=True)
    [[3], [2], [1], [0]]
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}  # by kind: the open bucket and its size
    for place in reversed(range(len(kinds))):
        size_bytes = sizes_bytes[place]
        if size_bytes * SEND_ALONE_FRACTION >= limit_bytes and not contiguous:
            buckets.append([place])
            continue
        bucket, filled_bytes = filling.pop(kinds[place], ([], 0))
        if not bucket:
            buckets.append(bucket)
        if contiguous:
            filling.clear()  # a gradient of another kind closes the preceding bucket
        bucket.append(place)
        if filled_bytes + size_bytes < limit_bytes:
            filling[kinds[place]] = bucket, filled_bytes + size_bytes
    return buckets
