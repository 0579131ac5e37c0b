"""Weights in safetensors files of other programs, read on demand.

Transformers and ``horovod-train checkpoint export`` write such files, one or several in a folder. Files are
mapped into memory, so a rank reads only its shard of a weight.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from horovod_train.checkpoint.arrays import Entry, header_size_bytes, parse_header
from horovod_train.checkpoint.stored_arrays import Piece, StoredArrays
from horovod_train.errors import CheckpointError, UserError

FIELD = "train.initial_weights"


def open_weights(path: Path) -> StoredArrays:
    """Return the arrays of a safetensors file, or of all safetensors files in a folder.

    Raises:
        UserError: There is no file, a file is damaged, or two files have an array of the same name.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        what = "a folder without files that end in .safetensors" if path.is_dir() else "no file"
        raise UserError(
            f"{FIELD}: {path} is {what}",
            hint="give a safetensors file, or a folder of them; `horovod-train checkpoint export` writes one",
        )
    seen: dict[str, Path] = {}
    pieces = []
    for file in files:
        try:
            found = list(_pieces_of(file))
        except (CheckpointError, OSError, ValueError) as error:
            raise UserError(
                f"{FIELD}: {file}: {error}", hint=("the file may be incomplete: copy it again")
            ) from error
        for piece in found:
            if other := seen.get(piece.entry.name):
                raise UserError(f"{FIELD}: {piece.entry.name!r} is in {other.name} and in {file.name}")
            seen[piece.entry.name] = file
        pieces += found
    return StoredArrays(pieces)


def _pieces_of(file: Path) -> Iterator[Piece]:
    size_bytes = file.stat().st_size
    with file.open("rb") as opened:
        header_size = header_size_bytes(opened.read(8), size_bytes)
        opened.seek(0)
        entries = parse_header(opened.read(header_size), size_bytes)
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return (Piece(entry, partial(_bytes_of, mapped, entry), str(file)) for entry in entries)


def _bytes_of(mapped: mmap.mmap, entry: Entry) -> memoryview:
    return memoryview(mapped)[entry.begin : entry.begin + entry.size_bytes]
