"""Check that all ranks have the same samples in the same order.

Ranks split samples by their numbers. If a list of files has another order on one rank, for example because
``os.listdir`` is not sorted, some samples are read twice and others never, without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.errors import UserError, describe_ranks, result_of

log = logging.getLogger(__name__)

NUM_SAMPLES = 8
NUM_MORE_READS = 5
"""Repeated reads of samples that differ between ranks: random augmentation differs between reads, too."""
MAX_DEPTH = 10
HINT = (
    "all ranks need the same samples in the same order: sort the result of os.listdir and glob, seed what is "
    "shuffled, and do not select samples by rank, because samples are split over ranks later"
)
Digests = dict[str, list[str]]
"""Digest of each part of a batch, by sample if the part has a row for each, or else one digest. The name of a
part begins with its kind: text or data."""


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

    Parts of a batch that differ between reads of the same rank (random augmentation with a generator that is
    not seeded) are not compared. If only texts differ, which may be paths on a host, a warning is logged.

    Args:
        world: All ranks.
        what: Name of the data set in the message, a plural.
        length: Number of samples on this rank.
        read: Returns a batch of the samples with some numbers.
        most: Number of samples to read.
    """
    if world.size == 1:
        return
    numbers = compared_samples(length, most)

    def digests_of_read() -> Digests:
        return digests(read(numbers), len(numbers))

    mine, problem = result_of(digests_of_read)
    everyone = allgather_json(world, [length, None if mine is None else _digest(repr(mine).encode())])
    lengths = [of_rank[0] for of_rank in everyone]
    if other := _other(lengths):
        raise UserError(
            f"{what} differ between ranks: {lengths[other]} samples on {describe_ranks([other])}, "
            f"{lengths[0]} on rank 0",
            hint=HINT,
        )
    if any(of_rank[1] is None for of_rank in everyone) or mine is None:
        if problem is not None:
            log.warning("%s are not compared between ranks: %s: %s", what, type(problem).__name__, problem)
        return
    if _other([of_rank[1] for of_rank in everyone]):
        reads = [result_of(digests_of_read)[0] or {} for _ in range(NUM_MORE_READS)]
        unstable = [name for name, rows in mine.items() if any(again.get(name) != rows for again in reads)]
        _compare(what, numbers, allgather_json(world, [unstable, mine]), is_first=world.rank == 0)


def _compare(what: str, numbers: Sequence[int], everyone: Sequence[Any], *, is_first: bool) -> None:
    """Raise ``UserError`` if data differ, log a warning if only texts do."""
    ignored = {name for unstable, _ in everyone for name in unstable}
    first: Digests = everyone[0][1]
    found = [
        (name, rank)
        for name, rows in first.items()
        for rank, (_, of_rank) in enumerate(everyone)
        if name not in ignored and of_rank.get(name, rows) != rows
    ]
    if not found:
        return
    name, rank = min(found)  # data before text
    rows, others = first[name], everyone[rank][1][name]
    which = f"a batch of samples {list(numbers)}"
    if len(rows) == len(others) == len(numbers):
        which = f"sample {numbers[next(at for at, row in enumerate(rows) if row != others[at])]}"
    message = (
        f"{what} differ between ranks: {which} on {describe_ranks([rank])} is not that of rank 0, and the "
        "lengths are equal"
    )
    if name.startswith("data"):
        raise UserError(message, hint=HINT)
    if is_first:
        log.warning("%s; only texts differ, such as paths. If they are not paths: %s", message, HINT)


def digests(batch: object, num_samples: int) -> Digests:
    """Return the digests of the parts of a batch of ``num_samples``."""
    found: Digests = {}
    for place, leaf in enumerate(_leaves(batch, MAX_DEPTH)):
        is_text = isinstance(leaf, str | bytes)
        rows, _ = result_of(partial(_rows, leaf, num_samples))
        rows = [type(leaf).__name__.encode()] if rows is None else rows
        found[f"{'text' if is_text else 'data'} {place}"] = [_digest(row) for row in rows]
    return found


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    """Yield the parts of a batch that are not containers."""
    inner: Iterator[Any] | None = None
    if depth == 0:
        return
    if isinstance(value, Mapping):
        inner = (each for pair in list(value.items()) for each in pair)
    elif isinstance(value, list | tuple):
        inner = iter([len(value), *value])
    elif isinstance(value, np.ndarray) and value.dtype == object:
        inner = iter([list(value.shape), *value.reshape(-1).tolist()])
    elif is_dataclass(value) and not isinstance(value, type):
        inner = (getattr(value, field.name, None) for field in fields(value))
    if inner is None:
        yield value
        return
    for each in inner:
        yield from _leaves(each, depth - 1)


def _rows(leaf: Any, num_samples: int) -> list[bytes]:
    """Return the content of a part, for each sample if its first dimension has their number."""
    if isinstance(leaf, str | bytes | int | float | complex | bool | type(None)):
        text = leaf if isinstance(leaf, bytes) else str(leaf).encode(errors="surrogateescape")
        return [type(leaf).__name__.encode() + text]
    if hasattr(leaf, "tobytes") and hasattr(leaf, "mode"):  # an image of PIL
        return [f"{leaf.mode} {leaf.size}".encode() + leaf.tobytes()]
    if hasattr(leaf, "detach"):  # a tensor; NumPy lacks bfloat16
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if "bfloat16" in str(leaf.dtype) else leaf
        leaf = leaf.numpy()
    if not hasattr(leaf, "__array__"):
        return [type(leaf).__name__.encode()]
    array = np.asarray(leaf)
    head = f"{array.shape[1:]} {array.dtype} ".encode()
    if array.ndim and len(array) == num_samples:
        return [head + row.tobytes() for row in array]
    return [head + array.tobytes()]


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def _other(values: Sequence[object]) -> int:
    """Return the first rank whose value is not that of rank 0; 0: all are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), 0)
