"""Arrays in safetensors files: written with checksums, and read on demand. Reading them executes no code.

    write_arrays, parse_header   write a safetensors file; read its header
    dump_state, parse_state      a JSON tree and its arrays as bytes
    Piece, StoredArrays          arrays of a checkpoint, read on demand: whole, or the part of a rank
    pack_tree, unpack_tree       nested state as JSON and arrays
    merge_trees                  packed trees of all ranks of a sharded state, as one

The safetensors library is not used for writing: this module computes checksums and flushes the file in the
pass that writes it, and supports arrays that are parts of larger ones.
Format, a JSON header and raw bytes: https://github.com/huggingface/safetensors#format

The header's ``__metadata__`` has one entry of this product: the SHA-256 of each array and, for a part, the
shape of the whole array and the position in it. The manifest of a checkpoint contains the SHA-256 of the
header, so each array can be read and verified separately.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from horovod_train.errors import CheckpointError

_DTYPES = {  # PyTorch's name -> (code in the file, size in bytes)
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "uint16": ("U16", 2),
    "uint32": ("U32", 4),
    "uint64": ("U64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
}
DTYPE_CODES = {name: code for name, (code, _) in _DTYPES.items()}
DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}
ITEM_SIZE_BYTES = {name: size for name, (_, size) in _DTYPES.items()}
_TREE = "__tree__"
METADATA = "__metadata__"
_OURS = "horovod_train"
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Part:
    """Position of a part in its array.

    Attributes:
        whole: Shape of the whole array.
        start: First index in each dimension, or one index if the part is a range of the flattened array.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class ArrayBlob:
    """A tensor of any framework, or a rank's part of it.

    Attributes:
        dtype: PyTorch's name of the element type, such as ``float32`` or ``bfloat16``.
        data: The elements, little endian, in C order.
        part: Position in the whole array; None: this is the whole array.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes
    part: Part | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self.shape if self.part is None else self.part.whole


@dataclass(frozen=True)
class ReplicaState:
    """State of a rank's replica that a checkpoint stores, without random generators and per-rank state.

    If several ranks have an array, or the same part of an array, its elements are equal on these ranks.

    Attributes:
        model: Weights and buffers by name.
        optimizer: State arrays by key.
        optimizer_tree: Structure of the optimizer's state, plain JSON with references to the arrays.
        scaler: State of the loss scaler, plain numbers.
        is_sharded: Whether each rank has only some of the arrays or parts; False: each rank has all.
    """

    model: Mapping[str, ArrayBlob]
    optimizer: Mapping[str, ArrayBlob]
    optimizer_tree: Any
    scaler: Mapping[str, float]
    is_sharded: bool = False


@dataclass(frozen=True)
class Digest:
    """SHA-256 and size of a file. The SHA-256 of a safetensors file is that of its header."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Entry:
    """Header entry of an array, or of a part of one, in a safetensors file.

    Attributes:
        dtype: PyTorch's name of the element type.
        shape: Shape of the stored elements.
        begin: Offset of its bytes from the beginning of the file.
        part: Position in the whole array; None: this is the whole array.
        sha256: SHA-256 of its bytes; None: the file has format version 1, without checksums of arrays.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int
    part: Part | None
    sha256: str | None


def write_arrays(path: Path, arrays: Mapping[str, ArrayBlob]) -> Digest:
    """Write arrays to a new safetensors file, and flush it to disk.

    Raises:
        CheckpointError: The format does not support an element type.
        OSError: The file exists already or cannot be written.
    """
    blank = _header(arrays, dict.fromkeys(arrays, _NO_DIGEST))
    digests: dict[str, str] = {}
    with path.open("xb") as file:
        file.write(blank)
        for name, blob in arrays.items():
            file.write(blob.data)
            digests[name] = hashlib.sha256(blob.data).hexdigest()
        size_bytes = file.tell()
        header = _header(arrays, digests)
        assert len(header) == len(blank)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    return Digest(hashlib.sha256(header).hexdigest(), size_bytes)


def write_plain(
    path: Path, arrays: Mapping[str, ArrayBlob], kinds: Mapping[str, tuple[str, tuple[int, ...]]]
) -> int:
    """Write whole arrays to a new file that every safetensors reader accepts; return its size in bytes.

    ``kinds`` contains element type and shape of each array in the order of writing. Arrays are read one at a
    time.

    Raises:
        CheckpointError: An array cannot be read.
        OSError: The file exists already or cannot be written.
    """
    at = 0
    entries: dict[str, object] = {METADATA: {"format": "pt"}}  # Transformers requires it
    for name, (dtype, shape) in kinds.items():
        size_bytes = math.prod(shape) * ITEM_SIZE_BYTES[dtype]
        entries[name] = _header_entry(dtype, shape, at, size_bytes)
        at += size_bytes
    with path.open("xb") as file:
        file.write(_packed(entries))
        for name in kinds:
            file.write(arrays[name].data)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def write_bytes(path: Path, content: bytes) -> Digest:
    """Write bytes to a new file, and flush it to disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return Digest(hashlib.sha256(content).hexdigest(), len(content))


def dump_state(tree: object, arrays: Mapping[str, ArrayBlob]) -> bytes:
    """Serialize a JSON tree and the arrays that it refers to."""
    text = json.dumps(tree).encode()
    with_tree = {**arrays, _TREE: ArrayBlob("uint8", (len(text),), text)}
    return b"".join([_header(with_tree), *(blob.data for blob in with_tree.values())])


def parse_state(content: bytes) -> tuple[object, dict[str, ArrayBlob]]:
    """Return the JSON tree and the arrays that ``dump_state`` has serialized.

    Raises:
        CheckpointError: The content is damaged.
    """
    arrays = parse_arrays(content)
    try:
        return json.loads(bytes(arrays.pop(_TREE).data)), arrays
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError("per-rank state, such as random generators, is damaged") from error


def parse_arrays(content: bytes) -> dict[str, ArrayBlob]:
    """Return the arrays in the content of a safetensors file, in the order of its header.

    Raises:
        CheckpointError: The content is not a valid safetensors file.
    """
    try:
        deserialize(content)  # type: ignore[no-untyped-call]  # validates as other readers do
    except SafetensorError as error:
        raise CheckpointError(f"not a safetensors file: {error}") from error
    entries = parse_header(content[: header_size_bytes(content[:8], len(content))], len(content))
    return {
        entry.name: ArrayBlob(
            entry.dtype, entry.shape, content[entry.begin : entry.begin + entry.size_bytes], entry.part
        )
        for entry in entries
    }


def header_size_bytes(first: bytes, size_bytes: int) -> int:
    """Return the header size of a safetensors file, from the file's first eight bytes and its whole size.

    Raises:
        CheckpointError: The file is shorter than its header.
    """
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else size_bytes
    if length + 8 > size_bytes:
        raise CheckpointError("not a safetensors file: it is shorter than its header")
    return int(length) + 8


def parse_header(header: bytes, size_bytes: int) -> list[Entry]:
    """Return the entries of a safetensors header in file order, which is therefore equal on every rank.

    ``header`` includes the eight bytes of its length; ``size_bytes`` is the size of the whole file.

    Raises:
        CheckpointError: The header is invalid, or an array is outside of the file.
    """
    try:
        document = json.loads(header[8:])
        ours = json.loads(document.pop(METADATA, {}).get(_OURS, "{}"))
        entries = [_entry(name, info, ours.get(name), len(header)) for name, info in document.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"not a safetensors file: {type(error).__name__}: {error}") from error
    for entry in entries:
        if entry.begin < len(header) or entry.begin + entry.size_bytes > size_bytes:
            raise CheckpointError(f"not a safetensors file: {entry.name} lies outside of it")
    return entries


def _entry(name: str, info: Mapping[str, Any], ours: list[Any] | None, header_size: int) -> Entry:
    first, stop = info["data_offsets"]
    shape = _lengths(info["shape"])
    digest, part = None, None
    if ours is not None:
        digest = str(ours[0])
        part = Part(_lengths(ours[1]), _lengths(ours[2])) if len(ours) > 1 else None
    if part is not None:
        _check_part(name, shape, part)
    size_bytes = int(stop) - int(first)
    dtype = DTYPE_NAMES[info["dtype"]]
    if size_bytes != math.prod(shape) * ITEM_SIZE_BYTES[dtype]:
        raise ValueError(f"{name} has {size_bytes} bytes, which does not fit {dtype} {list(shape)}")
    return Entry(name, dtype, shape, header_size + int(first), size_bytes, part, digest)


def _lengths(found: list[Any]) -> tuple[int, ...]:
    lengths = tuple(int(length) for length in found)
    if any(length < 0 for length in lengths):
        raise ValueError(f"{found} has negative lengths")
    return lengths


def _check_part(name: str, shape: tuple[int, ...], part: Part) -> None:
    """Raise ``ValueError`` if a part is not within its array."""
    frame = part.whole if len(part.start) == len(part.whole) else (math.prod(part.whole),)
    ends = [start + length for start, length in zip(part.start, shape, strict=True)]
    if len(ends) != len(frame) or any(end > length for end, length in zip(ends, frame, strict=True)):
        raise ValueError(f"{name}: a part of {list(shape)} at {list(part.start)} is not in {list(frame)}")


def _header(arrays: Mapping[str, ArrayBlob], digests: Mapping[str, str] | None = None) -> bytes:
    """Return the safetensors header of arrays, with their checksums if they are passed."""
    entries: dict[str, object] = {}
    if digests is not None:
        ours = {name: [digests[name], *_place(blob.part)] for name, blob in arrays.items()}
        entries[METADATA] = {_OURS: json.dumps(ours)}
    at = 0
    for name, blob in arrays.items():
        if blob.dtype not in DTYPE_CODES:
            raise CheckpointError(f"cannot save {name}: element type {blob.dtype} is not supported")
        entries[name] = _header_entry(blob.dtype, blob.shape, at, len(blob.data))
        at += len(blob.data)
    return _packed(entries)


def _header_entry(dtype: str, shape: tuple[int, ...], at: int, size_bytes: int) -> dict[str, object]:
    return {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [at, at + size_bytes]}


def _packed(entries: Mapping[str, object]) -> bytes:
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _place(part: Part | None) -> list[list[int]]:
    return [] if part is None else [list(part.whole), list(part.start)]


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

    The parts of an array may be in several files, one for each rank that has written a part. A reader may
    request the whole array or another part, because the number of ranks or the sharding has changed. Only
    stored parts that overlap the request are read, and all data that is read is verified.

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


ARRAY, TUPLE, MAP = "__array__", "__tuple__", "__map__"
RESERVED = {ARRAY, TUPLE, MAP}


def pack_tree(tree: object, is_array: Callable[[Any], bool]) -> tuple[object, dict[str, Any]]:
    """Split a tree into plain JSON and its arrays by name.

    Unlike pickle, reading the result cannot execute code. Optimizer states are nested dictionaries with
    tensors as leaves. JSON supports neither tensors nor tuples nor integer keys, so each of these is stored
    as an object with one reserved key:

        {"__array__": "state.0.exp_avg"}     a tensor, stored under that name
        {"__tuple__": [...]}                 a tuple
        {"__map__": [[key, value], ...]}     a dictionary with non-string or reserved keys

    >>> pack_tree({0: (1, [2.5, None])}, lambda leaf: False)
    ({'__map__': [[0, {'__tuple__': [1, [2.5, None]]}]]}, {})

    Raises:
        CheckpointError: The tree contains an object that is neither JSON data, a tuple nor an array.
    """
    arrays: dict[str, Any] = {}

    def pack(node: object, path: str) -> object:
        if is_array(node):
            arrays[path] = node
            return {ARRAY: path}
        if isinstance(node, dict):
            if all(isinstance(key, str) for key in node) and not RESERVED & node.keys():
                return {key: pack(value, _join(path, key)) for key, value in node.items()}
            return {MAP: [[pack(key, path), pack(v, _join(path, key))] for key, v in node.items()]}
        if isinstance(node, tuple):
            return {TUPLE: [pack(value, _join(path, at)) for at, value in enumerate(node)]}
        if isinstance(node, list):
            return [pack(value, _join(path, at)) for at, value in enumerate(node)]
        if node is None or isinstance(node, bool | int | float | str):
            return node
        raise CheckpointError(
            f"cannot save {path or 'the state'}: a {type(node).__name__} is neither data nor an array"
        )

    return pack(tree, ""), arrays


def unpack_tree(plain: object, arrays: Mapping[str, object]) -> Any:
    """Return the tree that ``pack_tree`` has split.

    Raises:
        CheckpointError: An array is missing, or the tree has an invalid structure.
    """
    try:
        return _unpack(plain, arrays)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state has an invalid structure: {error}") from error


def _unpack(plain: object, arrays: Mapping[str, object]) -> object:
    if isinstance(plain, list):
        return [_unpack(value, arrays) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if ARRAY in plain:
        if plain[ARRAY] not in arrays:
            raise CheckpointError(f"the array {plain[ARRAY]!r} is missing")
        return arrays[plain[ARRAY]]
    if TUPLE in plain:
        return tuple(_unpack(value, arrays) for value in plain[TUPLE])
    if MAP in plain:
        return {_unpack(key, arrays): _unpack(value, arrays) for key, value in plain[MAP]}
    return {key: _unpack(value, arrays) for key, value in plain.items()}


def merge_trees(trees: Sequence[Any]) -> Any:
    """Merge the packed trees of all ranks of a sharded state.

    Dictionaries are merged by key. Lists of strings become one list with each string once. Other lists must
    have equal lengths and are merged element by element. All other values must be equal.

    >>> merge_trees([{"a": 1, "names": ["x", "y"]}, {"b": [2], "names": ["y", "z"]}])
    {'a': 1, 'names': ['x', 'y', 'z'], 'b': [2]}

    Raises:
        CheckpointError: Trees contradict each other.
    """
    first = trees[0]
    if all(tree == first for tree in trees):
        return first
    if all(isinstance(tree, dict) for tree in trees):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: merge_trees([tree[key] for tree in trees if key in tree]) for key in keys}
    if all(isinstance(tree, list) for tree in trees):
        if all(isinstance(value, str) for tree in trees for value in tree):
            return list(dict.fromkeys(value for tree in trees for value in tree))
        if len({len(tree) for tree in trees}) == 1:
            return [merge_trees(values) for values in zip(*trees, strict=True)]
    raise CheckpointError(f"ranks have different states of the optimizer: {trees[0]} and others")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
