"""Sums of gradients over ranks, for frameworks whose backward pass returns all gradients at once.

Small gradients are copied into one contiguous buffer, a bucket, which one all-reduce sums, because each
message has a fixed cost. A large gradient is sent alone, from its own memory, because its copy would cost
more than the message. Buckets depend only on the order, dtypes and sizes of the gradients, so the order of
additions is the same in every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from horovod_train.collectives.base import Communicator

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


def name_of_exchange(gradients: Sequence[Any]) -> str:
    """Return a name for the exchange of the gradients that are not None.

    The name contains a checksum of their positions: if ranks use different variables, Horovod reports ranks
    that are missing from a collective, instead of summing gradients of different variables.
    """
    used = [place for place, gradient in enumerate(gradients) if gradient is not None]
    return "gradients" if len(used) == len(gradients) else f"gradients.{crc32(repr(used).encode()):08x}"


@dataclass
class Exchange(ABC):
    """Sum of lists of a framework's arrays over ranks; small arrays are packed into buckets.

    A subclass packs and reduces the arrays of one framework.

    Args:
        world: The communicator.
        bucket_size_bytes: Approximate size of a bucket.
        wire_dtype: Data type in which float32 arrays are sent, as an object of the framework: float32 or
            float16; None: float32.

    Attributes:
        seconds: Total time spent waiting for collectives; 0 if it cannot be measured.
    """

    world: Communicator
    bucket_size_bytes: int = 8 * 2**20
    wire_dtype: Any = None
    seconds: float = field(default=0.0, init=False)

    def sum(self, arrays: Sequence[Any], name: str = "gradients") -> list[Any]:
        """Return the elementwise sums over ranks, in the types and shapes of the arrays.

        Collective: all ranks pass arrays of the same shapes in the same order. The arrays may be overwritten:
        a sum may share memory with its array.

        Args:
            arrays: Arrays of floating-point types.
            name: Prefix of the collectives' names; equal on all ranks.
        """
        arrays = [self.dense(array) for array in arrays]
        if self.world.size == 1:
            return arrays
        kinds = [self.kind(array) for array in arrays]
        sizes_bytes = [self.size_on_wire_bytes(array) for array in arrays]
        plan = plan_buckets(kinds, sizes_bytes, self.bucket_size_bytes)
        buckets = (self.pack([arrays[place] for place in places], kinds[places[0]]) for places in plan)
        names = (f"horovod_train.{name}.{number}" for number in range(len(plan)))
        sums = arrays.copy()
        for places, total in zip(plan, self.reduce(buckets, names), strict=True):
            parts = self.unpack(total, [arrays[place] for place in places])
            for place, part in zip(places, parts, strict=True):
                sums[place] = part
        return sums

    def mean(self, arrays: Sequence[Any], name: str = "gradients") -> list[Any]:
        """Return the elementwise means over ranks; see ``sum``."""
        return [total / self.world.size for total in self.sum(arrays, name)]

    def bytes_on_wire(self, arrays: Sequence[Any]) -> int:
        """Return the number of bytes that a rank passes to collectives to sum such arrays."""
        return 0 if self.world.size == 1 else sum(self.size_on_wire_bytes(array) for array in arrays)

    def dense(self, array: Any) -> Any:
        """Return a dense array with the same elements."""
        return array

    @abstractmethod
    def kind(self, array: Any) -> Hashable:
        """Return a key that is equal for arrays that may share a bucket, such as the wire dtype."""

    @abstractmethod
    def size_on_wire_bytes(self, array: Any) -> int:
        """Return the size of an array in its wire dtype."""

    @abstractmethod
    def pack(self, arrays: Sequence[Any], kind: Any) -> Any:
        """Return one array in the wire dtype with the elements of all arrays."""

    @abstractmethod
    def reduce(self, buckets: Iterable[Any], names: Iterable[str]) -> Iterable[Any]:
        """Return the sum of each bucket over ranks. Buckets are packed while they are iterated."""

    @abstractmethod
    def unpack(self, total: Any, arrays: Sequence[Any]) -> Sequence[Any]:
        """Return the parts of a summed bucket in the types and shapes of its arrays."""
