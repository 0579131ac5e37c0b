"""TFRecord: records of ``tf.train.Example``, read without TensorFlow."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from horovod_train.data.source import ByteRanges, DataError, Rows
from horovod_train.errors import result_of

HEAD = struct.Struct("<QI")
"""Length of a record, and its checksum."""
TAIL_BYTES = 4
"""Checksum of the data of a record."""


class TfRecord(ByteRanges):
    """TFRecord files, plain or compressed. A stored sample has the features of a ``tf.train.Example``.

    A feature is an array of int64 or float32, or a list of bytes.
    """

    records: Literal["example", "bytes"] = "example"
    """Content of records; bytes: ``decode`` receives them as they are."""

    def rows(self, file: Path) -> Rows:
        """Return the range of the data of each record."""
        found = []
        size_bytes, start = file.stat().st_size, 0
        with file.open("rb") as opened:
            while start < size_bytes:
                opened.seek(start)
                head = opened.read(HEAD.size)
                if len(head) < HEAD.size:
                    raise DataError("is cut off within a record")
                length, checksum = HEAD.unpack(head)
                if masked_crc32c(head[:8]) != checksum:
                    raise DataError(f"is not a TFRecord file, or is damaged at byte {start}")
                stop = start + HEAD.size + length + TAIL_BYTES
                if stop > size_bytes:
                    raise DataError("is cut off within a record")
                found.append((start + HEAD.size, length + TAIL_BYTES))
                start = stop
        return np.array(found, np.int64).reshape(-1, 2)

    def parse(self, data: bytes) -> object:
        """Return the content of a record, whose checksum is compared if google-crc32c is installed."""
        data, tail = data[:-TAIL_BYTES], data[-TAIL_BYTES:]
        if _CRC32C is not None and masked(_CRC32C(data)) != int.from_bytes(tail, "little"):
            raise DataError("has a record whose checksum is wrong")
        if self.records == "bytes":
            return data
        try:
            return dict(features(data))
        except (ValueError, LookupError, TypeError, OverflowError, AttributeError, struct.error) as error:
            raise DataError(f"has a record that is not a tf.train.Example: {error}") from error


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901
        table.append(value)
    return table


_TABLE = _table()


def masked_crc32c(data: bytes) -> int:
    """Return the masked CRC-32C of TFRecord files (``tensorflow/core/lib/hash/crc32c.h``)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return masked(crc ^ 0xFFFFFFFF)


def masked(crc: int) -> int:
    """Return a checksum as TFRecord files store it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


_CRC32C: Callable[[bytes], int] | None = getattr(
    result_of(lambda: importlib.import_module("google_crc32c"))[0], "value", None
)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of the fields of a protobuf message: bytes, or an integer."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise ValueError("a field is cut off")
            yield number, data[at : at + length]
            at += length
        elif kind == 0:
            value, at = _varint(data, at)
            yield number, value
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            yield number, data[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {kind}")


def features(data: bytes) -> Iterator[tuple[str, Any]]:
    """Yield name and values of the features of a ``tf.train.Example`` (``example.proto``)."""
    for number, message in _fields(data):
        if number != 1:
            raise ValueError("it has other fields, as a SequenceExample: set records: bytes, and data.decode")
        for _, entry in _fields(message):
            parts = dict(_fields(entry))
            for kind, content in _fields(parts.get(2, b"")):
                yield parts[1].decode(), _VALUES[kind](content)


def _floats(content: bytes) -> Any:
    return np.concatenate(
        [np.frombuffer(value, "<f4") for _, value in _fields(content)] or [np.zeros(0, "f4")]
    )


def _integers(content: bytes) -> Any:
    found = []
    for _, value in _fields(content):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            found.append(number)
    return np.array(found, np.uint64).astype(np.int64)


_VALUES = {1: lambda content: [value for _, value in _fields(content)], 2: _floats, 3: _integers}
