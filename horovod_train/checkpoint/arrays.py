"""Arrays in a safetensors file: a JSON header and raw bytes, which cannot execute anything.

Written here rather than by the safetensors library because checksums are taken and the file is
flushed to disk in the one pass that writes it, and because a rank may hold only a part of an array.
Format: https://github.com/huggingface/safetensors#format

The header's ``__metadata__`` has one entry of ours: for each array its SHA-256 and, where it is a part, of
what. A manifest has the SHA-256 of the header, so that each array can be read, and checked, by itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

from horovod_train.errors import CheckpointError

_DTYPES = {  # by PyTorch's name: code in the file, size in bytes
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
    """Which part of an array this is.

    Attributes:
        whole: Shape of the array.
        start: Where the part begins in each dimension; a single number where the array is taken flat.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class ArrayBlob:
    """A tensor of any framework, or what a rank has of it: its bytes in C order.

    Attributes:
        dtype: Name of the element type as in PyTorch: ``float32``, ``bfloat16``.
        shape: Lengths of the dimensions.
        data: The elements, little endian.
        part: Of what it is a part; None: it is whole.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes
    part: Part | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the array that it belongs to."""
        return self.shape if self.part is None else self.part.whole


@dataclass(frozen=True)
class ReplicaState:
    """Everything that a rank has of a replica and a checkpoint keeps, except random generators.

    An array that several ranks have, or the same part of it, is the same on all of them.

    Attributes:
        model: Weights and buffers by name.
        optimizer: State arrays by key.
        optimizer_tree: Shape of the optimizer's state, plain JSON with references to the arrays.
        scaler: State of the loss scaler, plain numbers.
        is_sharded: Ranks share the model: each has some of it. Otherwise each has all of it.
    """

    model: Mapping[str, ArrayBlob]
    optimizer: Mapping[str, ArrayBlob]
    optimizer_tree: Any
    scaler: Mapping[str, float]
    is_sharded: bool = False


@dataclass(frozen=True)
class Digest:
    """What a manifest says of a file.

    Attributes:
        sha256: Of its bytes; of a file of arrays, of its header, which has those of the arrays.
        size_bytes: Of all of it.
    """

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Entry:
    """An array in a file of arrays.

    Attributes:
        name: Of the array.
        dtype: Name of the element type.
        shape: Lengths of the dimensions of what is in the file.
        begin: Of its bytes, counted from the beginning of the file.
        size_bytes: How many there are.
        part: Of what it is a part; None: it is whole.
        sha256: Of its bytes; None: the file is of the version before, which has none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int
    part: Part | None
    sha256: str | None


def write_arrays(path: Path, arrays: Mapping[str, ArrayBlob]) -> Digest:
    """Write arrays to a new file, flushed to disk.

    Raises:
        CheckpointError: An element type has no place in the format.
        OSError: The disk refuses.
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
    """Write whole arrays to a new file that any reader of safetensors takes; return its size in bytes.

    Args:
        path: The file.
        arrays: Read one at a time.
        kinds: Element type and shape of each, in the order in which they are written.

    Raises:
        CheckpointError: An array cannot be read.
        OSError: The disk refuses.
    """
    at = 0
    entries: dict[str, object] = {METADATA: {"format": "pt"}}  # which Transformers looks for
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
    """Write bytes to a new file, flushed to disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return Digest(hashlib.sha256(content).hexdigest(), len(content))


def dump_state(tree: object, arrays: Mapping[str, ArrayBlob]) -> bytes:
    """Return a JSON tree and the arrays it refers to as one piece of bytes."""
    text = json.dumps(tree).encode()
    with_tree = {**arrays, _TREE: ArrayBlob("uint8", (len(text),), text)}
    return b"".join([_header(with_tree), *(blob.data for blob in with_tree.values())])


def parse_state(content: bytes) -> tuple[object, dict[str, ArrayBlob]]:
    """Return what ``dump_state`` was given.

    Raises:
        CheckpointError: It is not such a piece.
    """
    arrays = parse_arrays(content)
    try:
        return json.loads(bytes(arrays.pop(_TREE).data)), arrays
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "what a rank keeps for itself, such as random generators, is damaged"
        ) from error


def parse_arrays(content: bytes) -> dict[str, ArrayBlob]:
    """Return the arrays of such a piece of bytes, in the order in which they were written.

    Raises:
        CheckpointError: It is none.
    """
    try:
        deserialize(content)  # type: ignore[no-untyped-call]  # looks at it as the library does
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
    """Return how many bytes at the beginning of a file are its header.

    Args:
        first: Its first eight bytes.
        size_bytes: Of the whole file.

    Raises:
        CheckpointError: It is not such a file.
    """
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else size_bytes
    if length + 8 > size_bytes:
        raise CheckpointError("not a safetensors file: it is shorter than its header")
    return int(length) + 8


def parse_header(header: bytes, size_bytes: int) -> list[Entry]:
    """Return what is in a file of arrays, in the order in which it was written: the same on all ranks.

    Args:
        header: With its length before it.
        size_bytes: Of the whole file.

    Raises:
        CheckpointError: Not a valid header, or it does not fit the file.
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
    """Refuse a part that is not within its array."""
    frame = part.whole if len(part.start) == len(part.whole) else (math.prod(part.whole),)
    ends = [start + length for start, length in zip(part.start, shape, strict=True)]
    if len(ends) != len(frame) or any(end > length for end, length in zip(ends, frame, strict=True)):
        raise ValueError(f"{name}: a part of {list(shape)} at {list(part.start)} is not in {list(frame)}")


def _header(arrays: Mapping[str, ArrayBlob], digests: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file of arrays, with their digests if there are some."""
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
