"""Sources: formats of files with samples.

    Source        a format, with its arguments as fields; one row of ``registry.SOURCES``
    ByteRanges    a format whose samples are ranges of bytes in a file
    Opened        an open file, from which samples are read

A source is files with known numbers of samples, and access to any sample of a local file. Everything else
exists once, for all formats: the index of the files, the order, the distribution over ranks, and the cache.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from horovod_train.config.fields import Section
from horovod_train.errors import UserError
from horovod_train.registry import OF_A_FILE, load_function
from horovod_train.system.machine import import_optional

SampleFunction = Callable[[object], object]
"""Function of a sample."""
Rows = npt.NDArray[np.int64]
"""Numbers that locate each sample in its file, shape [samples, numbers]."""


class DataError(UserError):
    """A file of samples that is damaged, has changed, or is not of the format of its source."""

    cause = "data"


class Opened(Protocol):
    """An open file."""

    def read(self, places: Sequence[int]) -> list[object]:
        """Return the samples at some places of the file, counted from 0, as they are stored."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Source(Section):
    """A format of files. Its fields are the arguments of ``data.source_args``.

    A class of another package derives from this one, and has ``rows`` and ``open``.
    """

    version: ClassVar[int] = 1
    """Must change if ``rows`` or ``unpack`` return something else for the same file."""

    is_one_sample: ClassVar[bool] = False
    """Each file is one sample: files are not opened for the index, unless functions need their samples."""

    def expand(self, file: str) -> list[str]:
        """Return the files of a file that was listed, such as the parts of a folder; paths or URLs."""
        return [file]

    def is_packed(self, name: str) -> bool:
        """Return whether a file of this name must be unpacked before it can be opened."""
        return False

    def unpack(self, file: Path, to: Path) -> None:
        """Write what ``open`` can read into the file ``to``.

        Raises:
            DataError: The file is damaged.
        """

    def companions(self, file: Path) -> list[Path]:
        """Return further local files that determine the samples of a file."""
        return []

    def __reduce__(self) -> tuple[object, ...]:
        """Let other processes, which have not imported the file of this class, do so."""
        module = type(self).__module__
        where = getattr(sys.modules[module], "__file__", "") if module.startswith(OF_A_FILE) else module
        return _source_at, (f"{where}:{type(self).__qualname__}", self.model_dump())

    def rows(self, file: Path) -> Rows:
        """Return the rows of the samples of a local file; there may be none.

        Raises:
            DataError: The file is not of this format.
        """
        raise NotImplementedError

    def open(self, file: Path, rows: Rows, url: str) -> Opened:
        """Open a local file, of which samples with some rows are used. ``url`` is its name in the job."""
        raise NotImplementedError

    def decode(self, sample: Any) -> object:
        """Return a sample of NumPy arrays, numbers and texts, if the job has no function for this."""
        return sample

    def described(self, files: Sequence[str]) -> Mapping[str, object]:
        """Return arguments that all files together determine, such as the names of classes."""
        return {}


def _source_at(location: str, fields: Mapping[str, object]) -> Source:
    found: type[Source] = load_function(location)  # type: ignore[assignment]
    return found.model_validate(fields)


@dataclass
class OpenedRanges:
    """A file whose samples are ranges of bytes."""

    parse: Callable[[bytes], object]
    rows: Rows
    file: Path

    def __post_init__(self) -> None:
        self._handle = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, places: Sequence[int]) -> list[object]:
        """Return the samples at some places."""
        return [self.parse(self._range(*row)) for row in self.rows[places].tolist()]

    def _range(self, start: int, length: int) -> bytes:
        parts = []
        while length > 0 and (part := os.pread(self._handle, length, start)):
            parts.append(part)
            start, length = start + len(part), length - len(part)
        if length > 0:
            raise DataError(f"{self.file} is shorter than when its index was made")
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


class ByteRanges(Source):
    """A format whose samples are ranges of bytes; a row is the place of the first byte, and their number.

    Files that end in .gz, .bz2, .xz or .zst are unpacked first.
    """

    def parse(self, data: bytes) -> object:
        """Return the sample that bytes contain."""
        raise NotImplementedError

    def is_packed(self, name: str) -> bool:
        """Return whether a name is that of a compressed file."""
        return is_compressed(name)

    def unpack(self, file: Path, to: Path) -> None:
        """Unpack a compressed file."""
        unpack(file, to)

    def open(self, file: Path, rows: Rows, url: str) -> Opened:
        """Open a local file."""
        return OpenedRanges(self.parse, rows, file)


def _chunks_of(opener: Callable[[Path], Any], file: Path) -> Iterator[bytes]:
    with opener(file) as packed:
        while chunk := packed.read(CHUNK_BYTES):
            yield chunk


def _chunks_of_zstd(file: Path) -> Iterator[bytes]:
    """Yield the content. Readers of the package take a file that is cut off for a complete one."""
    zstandard = import_optional("zstandard", needed_by=file.name, hint="pip install zstandard")
    frame = None
    with file.open("rb") as packed:
        while data := packed.read(CHUNK_BYTES):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise ValueError(str(error)) from error
                data = frame.unused_data
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it is cut off")


CHUNK_BYTES = 2**20
COMPRESSED: Mapping[str, Callable[[Path], Iterator[bytes]]] = {
    ".gz": partial(_chunks_of, gzip.open),
    ".tgz": partial(_chunks_of, gzip.open),
    ".bz2": partial(_chunks_of, bz2.open),
    ".xz": partial(_chunks_of, lzma.open),
    ".zst": _chunks_of_zstd,
    ".zstd": _chunks_of_zstd,
}


def is_compressed(name: str) -> bool:
    """Return whether a name is that of a compressed file."""
    return Path(name).suffix in COMPRESSED


def unpack(file: Path, to: Path) -> None:
    """Unpack a compressed file.

    Raises:
        DataError: The file is damaged.
    """
    if not file.stat().st_size:
        raise DataError("is empty")
    try:
        with to.open("wb") as written:
            written.writelines(COMPRESSED[file.suffix](file))
    except (EOFError, ValueError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the file
        raise DataError(f"cannot be unpacked: {error}") from error
