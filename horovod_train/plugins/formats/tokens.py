"""Tokens: sequences of one length from files of token numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from horovod_train.config.fields import Count
from horovod_train.data.source import DataError, Opened, Rows, Source

MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
"""Codes of data types in the index files of Megatron-LM (``indexed_dataset.py``)."""


@dataclass
class _Windows:
    """Sequences of a file."""

    tokens: npt.NDArray[Any]
    rows: Rows
    length: int
    pad: int

    def read(self, places: Sequence[int]) -> list[Any]:
        """Return sequences."""
        return [self._sequence(*row) for row in self.rows[places].tolist()]

    def _sequence(self, start: int, length: int) -> Any:
        found = np.array(self.tokens[start : start + length])
        if length == self.length:
            return found
        return np.concatenate([found, np.full(self.length - length, self.pad, found.dtype)])

    def close(self) -> None:
        """Let the memory map be closed."""
        del self.tokens


class Tokens(Source):
    """Files of token numbers: ``.npy``, ``.bin`` with the ``.idx`` of Megatron-LM, or ``.bin`` alone.

    A sample is an array of ``length`` numbers. Sequences do not overlap, and do not cross the end of a file.
    """

    length: Count
    """Numbers in a sequence. A model that predicts the next token of 1024 needs 1025."""

    dtype: Literal["uint8", "uint16", "int32", "uint32", "int64"] | None = None
    """Data type of ``.bin`` files that have no ``.idx`` beside them."""

    pack: Literal["tokens", "documents"] = "tokens"
    """tokens: a file is cut into sequences; what remains at its end is left out. documents: a sequence has as
    many whole documents as fit, which the ``.idx`` separates, and is padded; longer documents are cut."""

    pad: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    """Number that fills sequences of documents."""

    def rows(self, file: Path) -> Rows:
        """Return first number and length of each sequence."""
        tokens = self._tokens(file)
        if tokens.ndim != 1:
            raise DataError(f"has shape {tokens.shape}, and one dimension is required")
        if self.pack == "documents":
            limits = np.iinfo(tokens.dtype)
            if not limits.min <= self.pad <= limits.max:
                raise DataError(
                    f"has numbers of type {tokens.dtype}, to which pad = {self.pad} does not belong"
                )
            return self._packed(file)
        starts = np.arange(len(tokens) // self.length, dtype=np.int64) * self.length
        return np.stack([starts, np.full_like(starts, self.length)], axis=1)

    def companions(self, file: Path) -> list[Path]:
        """Return the index of Megatron-LM."""
        index = file.with_suffix(".idx")
        return [index] if file.suffix == ".bin" and index.is_file() else []

    def open(self, file: Path, rows: Rows, url: str) -> Opened:
        """Open a local file."""
        return _Windows(np.asarray(self._tokens(file)), rows, self.length, self.pad)

    def decode(self, sample: Any) -> Any:
        """Return the numbers as 64-bit integers, which embeddings of all frameworks take."""
        return sample.astype(np.int64)

    def _tokens(self, file: Path) -> npt.NDArray[Any]:
        if file.suffix == ".npy":
            return mapped_array(file)
        index = file.with_suffix(".idx")
        size_bytes = file.stat().st_size
        if index.is_file():
            name, lengths = _read_index(index)
            expected = int(lengths.sum()) * np.dtype(name).itemsize
            if expected != size_bytes:
                raise DataError(f"has {size_bytes} bytes, and by {index.name} {expected} are expected")
        elif self.dtype is None:
            raise DataError(f"has no {index.name} beside it", hint="set data.source_args.dtype")
        else:
            name = self.dtype
        dtype = np.dtype(name)
        if size_bytes % dtype.itemsize:
            raise DataError(f"has {size_bytes} bytes, which are no whole numbers of type {dtype}")
        return np.memmap(file, dtype, "r") if size_bytes else np.zeros(0, dtype)

    def _packed(self, file: Path) -> Rows:
        index = file.with_suffix(".idx")
        if not index.is_file():
            raise DataError(f"has no {index.name}, which separates its documents")
        _, lengths = _read_index(index)
        found: list[tuple[int, int]] = []
        start = used = 0  # of the sequence that is filled
        for length in lengths.tolist():
            if used and used + length > self.length:
                found.append((start, used))
                start, used = start + used, 0
            used += length
            while used > self.length:  # a document that is longer than a sequence
                found.append((start, self.length))
                start, used = start + self.length, used - self.length
        if used:
            found.append((start, used))
        return np.array(found, np.int64).reshape(-1, 2)


def mapped_array(file: Path) -> npt.NDArray[Any]:
    """Map an ``.npy`` file into memory.

    Raises:
        DataError: It is none.
    """
    try:
        found: npt.NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"is not an .npy file, or is damaged: {error}") from error
    return found


def _read_index(file: Path) -> tuple[str, npt.NDArray[np.int64]]:
    """Return data type and lengths of the documents in an index file of Megatron-LM."""
    data = file.read_bytes()
    try:
        version, code, num_sequences, num_documents = struct.unpack_from("<QBQQ", data, len(MAGIC))
        start = len(MAGIC) + 25
        of_sequences = np.frombuffer(data, np.int32, num_sequences, start).astype(np.int64)
        # A document has one or more sequences; the last entry is the end of the last one.
        firsts = np.frombuffer(data, np.int64, num_documents, start + 12 * num_sequences)
        ends = np.concatenate([[0], np.cumsum(of_sequences)])
        lengths = np.diff(ends[firsts])
    except (struct.error, ValueError, IndexError) as error:
        raise DataError(f"{file.name} is cut off, or is not an index of Megatron-LM") from error
    if not data.startswith(MAGIC) or version != 1 or code not in MEGATRON_TYPES:
        raise DataError(f"{file.name} is not an index of Megatron-LM, version 1")
    return MEGATRON_TYPES[code], lengths
