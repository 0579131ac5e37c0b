"""Arrays in a safetensors file: a JSON header and raw bytes, which cannot execute anything.

Written here rather than by the safetensors library because the checksum is taken and the file is
flushed to disk in the one pass that writes it. Read back by the library.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

from horovod_train.errors import CheckpointError

DTYPE_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}
_TREE = "__tree__"


@dataclass(frozen=True)
class ArrayBlob:
    """A tensor of any framework: its bytes in C order.

    Attributes:
        dtype: Name of the element type as in PyTorch: ``float32``, ``bfloat16``.
        shape: Lengths of the dimensions.
        data: The elements, little endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes


@dataclass(frozen=True)
class ReplicaState:
    """Everything of a replica that a checkpoint keeps, except random generators.

    Attributes:
        model: Weights and buffers by name.
        optimizer: State arrays by key.
        optimizer_tree: Shape of the optimizer's state, plain JSON with references to the arrays.
        scaler: State of the loss scaler, plain numbers.
    """

    model: Mapping[str, ArrayBlob]
    optimizer: Mapping[str, ArrayBlob]
    optimizer_tree: Any
    scaler: Mapping[str, float]


@dataclass(frozen=True)
class Digest:
    """What a manifest says of a file."""

    sha256: str
    size_bytes: int


def write_arrays(path: Path, arrays: Mapping[str, ArrayBlob]) -> Digest:
    """Write arrays to a new file, flushed to disk.

    Raises:
        CheckpointError: An element type has no place in the format.
        OSError: The disk refuses.
    """
    return write_parts(path, [_header(arrays), *(blob.data for blob in arrays.values())])


def write_parts(path: Path, parts: list[bytes | memoryview]) -> Digest:
    """Write bytes to a new file, flushed to disk, hashing on the way."""
    hasher = hashlib.sha256()
    size_bytes = 0
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            hasher.update(part)
            size_bytes += len(part)
        file.flush()
        os.fsync(file.fileno())
    return Digest(hasher.hexdigest(), size_bytes)


def dump_state(tree: object, arrays: Mapping[str, ArrayBlob]) -> bytes:
    """Return a JSON tree and the arrays it refers to as one piece of bytes."""
    text = json.dumps(tree).encode()
    with_tree = {**arrays, _TREE: ArrayBlob("uint8", (len(text),), text)}
    return b"".join([_header(with_tree), *(blob.data for blob in with_tree.values())])


def parse_state(content: bytes) -> tuple[object, dict[str, ArrayBlob]]:
    """Return what ``dump_state`` was given.

    Raises:
        CheckpointError: It is no such piece.
    """
    arrays = parse_arrays(content)
    try:
        return json.loads(bytes(arrays.pop(_TREE).data)), arrays
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "what a rank keeps for itself, such as random generators, is damaged"
        ) from error


def parse_arrays(content: bytes) -> dict[str, ArrayBlob]:
    """Return the arrays of such a file, in the order in which they were written: the same on all ranks.

    Raises:
        CheckpointError: It is no such file.
    """
    try:
        found = {
            name: ArrayBlob(DTYPE_NAMES[info["dtype"]], tuple(info["shape"]), bytes(info["data"]))
            for name, info in deserialize(content)  # type: ignore[no-untyped-call]
        }
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"not a safetensors file: {error}") from error
    # The library gives them in any order.
    header = json.loads(content[8 : 8 + struct.unpack_from("<Q", content)[0]])
    return {name: found[name] for name in header if name in found}


def _header(arrays: Mapping[str, ArrayBlob]) -> bytes:
    entries: dict[str, object] = {}
    at = 0
    for name, blob in arrays.items():
        if blob.dtype not in DTYPE_CODES:
            raise CheckpointError(f"cannot save {name}: element type {blob.dtype} is not supported")
        stop = at + len(blob.data)
        entries[name] = {
            "dtype": DTYPE_CODES[blob.dtype],
            "shape": list(blob.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
