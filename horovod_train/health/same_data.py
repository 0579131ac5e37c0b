"""Check that all ranks have the same samples in the same order.

Ranks split samples by their numbers. If a list of files has another order on one rank, for example because
``os.listdir`` is not sorted, some samples are read twice and others never, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.errors import UserError, describe_ranks

NUM_SAMPLES = 8
HINT = (
    "all ranks need the same samples in the same order: sort the result of os.listdir and glob, seed what is "
    "shuffled, and do not select samples by rank, because samples are split over ranks later"
)


def compared_samples(length: int, most: int = NUM_SAMPLES) -> list[int]:
    """Return the numbers of the samples that ranks compare: the first, the last, and some between them.

    >>> compared_samples(3), compared_samples(1000, 4)
    ([0, 1, 2], [0, 333, 666, 999])
    """
    num = min(most, length)
    return sorted({round(at * (length - 1) / max(1, num - 1)) for at in range(num)})


def check_same_data(
    world: Communicator, what: str, length: int, read: Callable[[Sequence[int]], Any], most: int = NUM_SAMPLES
) -> None:
    """Raise ``UserError`` on all ranks if lengths or samples of a data set differ between ranks. Collective.

    Parts of a sample that differ between two reads of the same rank (random augmentation with a generator
    that is not seeded) are not compared.

    Args:
        world: All ranks.
        what: Name of the data set in the message.
        length: Number of samples on this rank.
        read: Returns a batch of the samples with some numbers.
        most: Number of samples to read.
    """
    if world.size == 1:
        return
    numbers = compared_samples(length, most)
    mine = digests(read(numbers), len(numbers))
    everyone = allgather_json(world, [length, _digest(repr(mine).encode())])
    lengths = [of_rank[0] for of_rank in everyone]
    if other := _other(lengths):
        raise UserError(
            f"{what} differ between ranks: {lengths[other]} samples on {describe_ranks([other])}, "
            f"{lengths[0]} on rank 0",
            hint=HINT,
        )
    if not _other([of_rank[1] for of_rank in everyone]):
        return
    again = digests(read(numbers), len(numbers))
    stable = {name: value for name, value in mine.items() if again.get(name) == value}
    of_ranks: list[dict[str, str]] = allgather_json(world, stable)
    for rank, of_rank in enumerate(of_ranks):
        differing = [
            name for name in of_ranks[0] if of_rank.get(name, of_ranks[0][name]) != of_ranks[0][name]
        ]
        if differing:
            row = differing[0].partition(" ")[0]
            which = f"sample {numbers[int(row)]}" if row else f"a batch of samples {numbers}"
            raise UserError(
                f"{what} differ between ranks: {which} on {describe_ranks([rank])} is not that of rank 0 "
                f"({length} samples on both)",
                hint=HINT,
            )


def digests(batch: object, num_samples: int) -> dict[str, str]:
    """Return a digest of each part of a batch by "row place"; row is empty if it has no row per sample."""
    found = {}
    for place, leaf in enumerate(_leaves(batch)):
        rows = _rows(leaf, num_samples)
        for row, data in enumerate(rows):
            found[f"{row if len(rows) > 1 or num_samples == 1 else ''} {place}"] = _digest(data)
    return found


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the parts of a batch that are not containers."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        yield len(value)
        for each in value:
            yield from _leaves(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def _rows(leaf: Any, num_samples: int) -> list[bytes]:
    """Return the content of a part, for each sample if its first dimension has their number."""
    if hasattr(leaf, "tobytes") and hasattr(leaf, "mode"):  # an image of PIL
        return [f"{leaf.mode} {leaf.size}".encode() + leaf.tobytes()]
    if not hasattr(leaf, "__array__") and not hasattr(leaf, "detach"):
        plain = isinstance(leaf, str | bytes | int | float | complex | bool | type(None))
        return [f"{type(leaf).__name__} {leaf if plain else ''}".encode()]
    try:
        array = _as_array(leaf)
    except (TypeError, ValueError, RuntimeError):  # a sparse tensor, for example
        return [type(leaf).__name__.encode()]
    head = f"{array.shape[1:]} {array.dtype} ".encode()
    if array.ndim and len(array) == num_samples:
        return [head + (row.tobytes() if array.dtype != object else repr(row).encode()) for row in array]
    return [head + array.tobytes()]


def _as_array(leaf: Any) -> Any:
    """Return a NumPy array of a tensor or an array; bfloat16, which NumPy lacks, as float32."""
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if "bfloat16" in str(leaf.dtype) else leaf
        return leaf.numpy()
    return np.asarray(leaf)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def _other(values: Sequence[object]) -> int:
    """Return the first rank whose value is not that of rank 0; 0: all are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), 0)
