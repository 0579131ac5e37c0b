"""MDS, the format of MosaicML Streaming, read without its package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.data.source import DataError, Opened, OpenedRanges, Rows, Source, is_compressed, unpack
from horovod_train.plugins.formats.images import image_array

_NUMBERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
SCALARS = {"int": "int64", **{name: name for name in (*_NUMBERS, "float16", "float32", "float64")}}
"""Data types of numbers, by their encodings."""
ARRAY_TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
               34: "float32", 64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
"""Codes of the data types of arrays (``encodings.py`` of MosaicML Streaming)."""
DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "json": json.loads,
    "jpeg": image_array,
    "png": image_array,
    "jpeg_array": image_array,
    "jpegarray": image_array,
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
}


@dataclass(frozen=True)
class Column:
    """A column of a file: its name, its encoding, and its bytes in each sample; None: they vary."""

    name: str
    encoding: str
    size_bytes: int | None

    def decoded(self, data: bytes) -> Any:
        """Return a value.

        Raises:
            DataError: The encoding is not supported.
        """
        kind, _, more = self.encoding.partition(":")
        if kind in SCALARS:
            return np.frombuffer(data, SCALARS[kind])[0]
        if kind == "ndarray":
            return _array(data, *more.split(":"))
        if kind in DECODERS:
            return DECODERS[kind](data)
        unsafe = ", because unpickling runs code of the file" if kind == "pkl" else ""
        raise DataError(f"has the encoding {self.encoding!r}, which is not supported{unsafe}")


def _array(data: bytes, dtype: str = "", shape: str = "") -> Any:
    """Decode an array, whose type and shape are part of the encoding, or come first in the data."""
    at = 0
    if not dtype:
        dtype, at = ARRAY_TYPES[data[0]], 1
    if shape:
        sizes = [int(size) for size in shape.split(",")]
    else:
        count, kind = data[at] >> 2, np.dtype(f"u{1 << (data[at] & 3)}")
        sizes = np.frombuffer(data, kind, count, at + 1).tolist()
        at += 1 + count * kind.itemsize
    return np.frombuffer(data, np.dtype(dtype), offset=at).reshape(sizes)


class Mds(Source):
    """MDS files (``shard.*.mds``), also compressed. A stored sample has the bytes of each column."""

    def is_packed(self, name: str) -> bool:
        """Return whether a name is that of a compressed file."""
        return is_compressed(name)

    def unpack(self, file: Path, to: Path) -> None:
        """Unpack a compressed file."""
        unpack(file, to)

    def rows(self, file: Path) -> Rows:
        """Return the range of each sample."""
        with file.open("rb") as opened:
            (count,) = np.frombuffer(opened.read(4).ljust(4, b"\xff"), np.uint32).tolist()
            size_bytes = file.stat().st_size
            if 4 * (count + 2) > size_bytes:
                raise DataError("is not an MDS file, or is cut off")
            ends = np.frombuffer(opened.read(4 * (count + 1)), np.uint32).astype(np.int64)
        if ends[-1] != size_bytes or (np.diff(ends) < 0).any():
            raise DataError(f"is damaged: it has {size_bytes} bytes, and {ends[-1]} are expected")
        columns_of(file)
        return np.stack([ends[:-1], np.diff(ends)], axis=1)

    def open(self, file: Path, rows: Rows, url: str) -> Opened:
        """Open a local file."""
        columns = columns_of(file)
        return OpenedRanges(lambda data: Stored(columns, data), rows, file)

    def decode(self, sample: Stored) -> dict[str, Any]:
        """Return the value of each column."""
        return {column.name: column.decoded(sample[column.name]) for column in sample.columns}


def columns_of(file: Path) -> Sequence[Column]:
    """Return the columns of a file, from the description in its header."""
    with file.open("rb") as opened:
        count = int(np.frombuffer(opened.read(4), np.uint32)[0])
        first = int(np.frombuffer(opened.read(4), np.uint32)[0])
        opened.seek(4 * (count + 2))
        text = opened.read(first - 4 * (count + 2))
    try:
        found = json.loads(text)
        names, encodings, sizes = (found[f"column_{each}"] for each in ("names", "encodings", "sizes"))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError("is not an MDS file, or its header is damaged") from error
    return [Column(*each) for each in zip(names, encodings, sizes, strict=True)]


class Stored(dict[str, bytes]):
    """The bytes of each column of a sample.

    Data begins with the sizes of the columns whose bytes vary; the data of all columns follows.
    """

    def __init__(self, columns: Sequence[Column], data: bytes) -> None:
        super().__init__()
        self.columns = columns
        varying = [column for column in columns if column.size_bytes is None]
        sizes = iter(np.frombuffer(data, np.uint32, len(varying)).tolist())
        at = 4 * len(varying)
        for column in columns:
            size = column.size_bytes if column.size_bytes is not None else next(sizes)
            self[column.name] = data[at : at + size]
            at += size
