"""Arrays of a checkpoint, read on demand: whole, or the part that a rank requires.

The parts of an array may be in several files, one for each rank that has written a part. A reader may request
the whole array or another part, because the number of ranks or the sharding has changed. Only stored parts
that overlap the request are read, and all data that is read is verified.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from horovod_train.checkpoint.arrays import ITEM_SIZE_BYTES, ArrayBlob, Entry, Part
from horovod_train.errors import CheckpointError

Elements = npt.NDArray[np.void]


@dataclass(frozen=True)
class Piece:
    """An array, or a part of one, in one file.

    Attributes:
        entry: Its header entry.
        read: Returns its bytes without verification.
        where: Path of the file, for error messages.
    """

    entry: Entry
    read: Callable[[], bytes | memoryview]
    where: str

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self.entry.shape if self.entry.part is None else self.entry.part.whole

    def checked_bytes(self) -> bytes | memoryview:
        """Return the bytes; raises ``CheckpointError`` if the file has a checksum of them that differs."""
        found = self.read()
        if self.entry.sha256 is not None and hashlib.sha256(found).hexdigest() != self.entry.sha256:
            raise CheckpointError(f"{self.where}: is damaged: the checksum of {self.entry.name} is wrong")
        return found


class StoredArrays(Mapping[str, ArrayBlob]):
    """The arrays of a section (``model``, ``optimizer``, ...) by name, read on demand from all its files.

    Raises:
        CheckpointError: Parts of an array disagree about its shape or element type.
    """

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            of_array = self._pieces.setdefault(piece.entry.name, [])
            of_array.append(piece)
            first = of_array[0]
            if (piece.whole, piece.entry.dtype) != (first.whole, first.entry.dtype):
                raise CheckpointError(
                    f"{piece.where}: {piece.entry.name} is of {piece.entry.dtype} {list(piece.whole)}, and "
                    f"in {first.where} of {first.entry.dtype} {list(first.whole)}"
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, name: str) -> ArrayBlob:
        """Read a whole array."""
        pieces = self._pieces[name]
        if pieces[0].entry.part is None:
            return ArrayBlob(pieces[0].entry.dtype, pieces[0].whole, pieces[0].checked_bytes())
        return self.part(name, pieces[0].whole, None)

    def pieces(self, name: str) -> list[Piece]:
        """Return the stored parts of an array."""
        return self._pieces[name]

    def replaced(self, others: Mapping[str, list[Piece]]) -> StoredArrays:
        """Return a copy with some arrays added or replaced by name."""
        found = StoredArrays()
        found._pieces = {**self._pieces, **others}
        return found

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return element type and shape of an array, without reading its elements."""
        first = self._pieces[name][0]
        return first.entry.dtype, first.whole

    def part(self, name: str, shape: Sequence[int], part: Part | None) -> ArrayBlob:
        """Read the part of an array that has this shape and this position; ``part`` None: the whole array.

        Raises:
            KeyError: There is no array of this name.
            CheckpointError: The array has another shape, is damaged, or is incomplete.
        """
        dtype, whole = self.kind(name)
        lengths = tuple(shape)
        if (lengths if part is None else part.whole) != whole:
            wanted = list(lengths if part is None else part.whole)
            raise CheckpointError(
                f"{name} has shape {list(whole)} in the checkpoint, but {wanted} in the model"
            )
        found = self._elements(name, dtype, whole, lengths, part)
        return ArrayBlob(dtype, lengths, found.reshape(-1).view(np.uint8).data, part)

    def _elements(
        self, name: str, dtype: str, whole: tuple[int, ...], lengths: tuple[int, ...], part: Part | None
    ) -> Elements:
        item = np.dtype(f"V{ITEM_SIZE_BYTES[dtype]}")
        wanted = flat_range(whole, lengths, part)
        near = [p for p in self._pieces[name] if _overlaps(_range_of(p), _reach(whole, lengths, part))]
        ranges = [flat_range(whole, piece.entry.shape, piece.entry.part) for piece in near]
        if wanted is not None and all(each is not None for each in ranges):
            return _from_ranges(name, item, wanted, list(zip(near, ranges, strict=True)))  # type: ignore[arg-type]
        assembled = _assembled(name, item, whole, self._pieces[name])
        if part is None:
            return assembled
        if len(part.start) != len(whole):
            return assembled.reshape(-1)[part.start[0] : part.start[0] + lengths[0]]
        return np.ascontiguousarray(assembled[_box(part, lengths)])


def flat_range(whole: tuple[int, ...], lengths: tuple[int, ...], part: Part | None) -> tuple[int, int] | None:
    """Return the range [begin, end) of a part's elements in C order; None: they are not contiguous.

    >>> flat_range((6, 4), (2, 4), Part((6, 4), (2, 0)))
    (8, 16)
    >>> flat_range((6, 4), (6, 2), Part((6, 4), (0, 2))) is None
    True
    >>> flat_range((6, 4), (5,), Part((6, 4), (3,)))
    (3, 8)
    """
    is_box = part is not None and len(part.start) == len(whole) and math.prod(lengths) > 0
    # Contiguous: dimensions of length 1, then one dimension of any length, then complete dimensions.
    cut = next((at for at, length in enumerate(lengths) if length != 1), len(lengths))
    if is_box and any(lengths[at] != whole[at] for at in range(cut + 1, len(lengths))):
        return None
    return _reach(whole, lengths, part)


def _reach(whole: tuple[int, ...], lengths: tuple[int, ...], part: Part | None) -> tuple[int, int]:
    """Return the smallest range [begin, end) in C order that contains all elements of a part."""
    if part is None:
        return 0, math.prod(whole)
    if math.prod(lengths) == 0:
        return 0, 0
    if len(part.start) != len(whole):
        return part.start[0], part.start[0] + lengths[0]
    last = [start + length - 1 for start, length in zip(part.start, lengths, strict=True)]
    if not whole:
        return 0, 1
    return int(np.ravel_multi_index(part.start, whole)), int(np.ravel_multi_index(last, whole)) + 1


def _range_of(piece: Piece) -> tuple[int, int]:
    return _reach(piece.whole, piece.entry.shape, piece.entry.part)


def _overlaps(one: tuple[int, int], two: tuple[int, int]) -> bool:
    return max(one[0], two[0]) < min(one[1], two[1])


def _from_ranges(
    name: str,
    item: np.dtype[np.void],
    wanted: tuple[int, int],
    pieces: Sequence[tuple[Piece, tuple[int, int]]],
) -> Elements:
    """Assemble a range of elements from stored parts that are contiguous ranges."""
    begin, end = wanted
    target = np.empty(end - begin, item)
    num_found = 0
    for piece, (first, last) in pieces:
        low, high = max(begin, first), min(end, last)
        source = np.frombuffer(piece.checked_bytes(), item)
        target[low - begin : high - begin] = source[low - first : high - first]
        num_found += high - low
    _check_complete(name, num_found, end - begin)
    return target


def _assembled(
    name: str, item: np.dtype[np.void], whole: tuple[int, ...], pieces: Sequence[Piece]
) -> Elements:
    """Assemble a whole array from its stored parts."""
    target = np.empty(whole, item)
    num_found = 0
    for piece in pieces:
        part, shape = piece.entry.part, piece.entry.shape
        source = np.frombuffer(piece.checked_bytes(), item)
        num_found += len(source)
        if part is None:
            target[...] = source.reshape(whole)
        elif len(part.start) != len(whole):
            target.reshape(-1)[part.start[0] : part.start[0] + len(source)] = source
        else:
            target[_box(part, shape)] = source.reshape(shape)
    _check_complete(name, num_found, math.prod(whole))
    return target


def _box(part: Part, lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(part.start, lengths, strict=True))


def _check_complete(name: str, num_found: int, num_wanted: int) -> None:
    if num_found != num_wanted:
        raise CheckpointError(f"{name}: {num_found} of its {num_wanted} elements are in the checkpoint")
