"""Arrays in safetensors files: a JSON header and raw bytes. Reading such a file cannot execute code.

The safetensors library is not used for writing: this module computes checksums and flushes the file in the
pass that writes it, and supports arrays that are parts of larger ones.
Format: https://github.com/huggingface/safetensors#format

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
