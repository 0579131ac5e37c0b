"""Checkpoints as folders: written atomically, and verified by checksums when read.

    <dir>/step-000000000120/
        manifest.json              sizes, SHA-256, progress, metrics; its own checksum
        model.safetensors          weights and buffers
        optimizer.safetensors      optimizer state
        rng.safetensors            random generators, one array of bytes for each rank
        own.safetensors            per-rank state (residuals, ...); absent if no rank has one
        state.json                 progress, loss scaler, structure of the optimizer's state, history
        config.json                the resolved job

If the model is sharded, each rank writes its shards to files with its rank in the name, such as
``model-00003.safetensors``; arrays of the same name are shards of one tensor (see ``stored_arrays.py``).

A checkpoint is written under a temporary name, flushed, and renamed, so readers see it complete or not at
all. The next run that opens the folder for writing removes temporary folders that remain after a crash.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from horovod_train.checkpoint.arrays import (
    Digest,
    Entry,
    header_size_bytes,
    parse_header,
)
from horovod_train.checkpoint.schema import ManifestDocument, checked
from horovod_train.checkpoint.stored_arrays import Piece, StoredArrays
from horovod_train.errors import CheckpointError

FORMAT_VERSION = 2
WITHOUT_ARRAY_CHECKSUMS = 1
"""Format version 1: one checksum per safetensors file, none per array."""
MANIFEST = "manifest.json"
DAMAGED = "damaged"
ARRAYS = ("model", "optimizer", "rng", "own")
DOCUMENTS = ("state", "config")
OPTIONAL = ("own",)
_NAME = re.compile(r"^step-(\d{12})$")
MAX_MANIFEST_BYTES = 16 * 2**20
TEMPORARY = ".writing-"
REPLACED = ".replaced-"


@dataclass(frozen=True)
class Stored:
    """The content of a checkpoint, or the part of it that was requested.

    Attributes:
        arrays: Arrays by name, read on demand, for ``model``, ``optimizer``, ``rng`` and, if any, ``own``.
        documents: Plain JSON of ``state`` and ``config``.
        summary: Values shown by ``checkpoint ls``: epoch, metrics, world size, time.
    """

    arrays: Mapping[str, StoredArrays]
    documents: Mapping[str, Any]
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """The parsed ``manifest.json`` of a checkpoint."""

    step: int
    files: Mapping[str, Digest]
    summary: Mapping[str, Any]
    version: int = FORMAT_VERSION

    @property
    def size_bytes(self) -> int:
        """Size of all files except the manifest."""
        return sum(digest.size_bytes for digest in self.files.values())


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint folder, possibly damaged; ``step`` is from its manifest, or else from its name."""

    path: Path
    step: int

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name


def list_checkpoints(directory: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints of a folder, newest first; an absent folder has none."""
    if not directory.is_dir():
        return []
    found = [
        StoredCheckpoint(path, step_of(path, int(match[1])))
        for path in directory.iterdir()
        if (match := _NAME.match(path.name))
    ]
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.name), reverse=True)


def step_of(path: Path, by_name: int) -> int:
    """Return a checkpoint's step, from its manifest if readable: the folder may have been renamed."""
    try:
        return read_manifest(path).step
    except (CheckpointError, OSError):
        return by_name


def list_damaged(directory: Path) -> list[Path]:
    """Return the folders that were quarantined as damaged."""
    return sorted(path for path in directory.glob(f"{DAMAGED}-*-step-*") if path.is_dir())


def remove_leftovers(directory: Path) -> None:
    """Remove an interrupted writer's folders; restore a moved checkpoint. Only the writer may call it."""
    for path in directory.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(f"{REPLACED}*"):
        original = directory / path.name.removeprefix(REPLACED)
        if original.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(original)


def remove(checkpoint: StoredCheckpoint) -> None:
    """Remove a checkpoint: rename it, so that it is no longer listed, then delete it."""
    doomed = checkpoint.path.with_name(f"{TEMPORARY}removed-{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def quarantine(path: Path, reason: str) -> Path:
    """Rename the folder of a checkpoint so that it is no longer listed, and return its new path."""
    number = 1
    while (target := path.with_name(f"{reason}-{number}-{path.name}")).exists():
        number += 1
    path.rename(target)
    return target


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: The manifest is missing or damaged, or has an unsupported format.
        OSError: The file exists but cannot be read.
    """
    file = path / MANIFEST
    try:
        document = json.loads(_read_regular(file, MAX_MANIFEST_BYTES))
        claimed = document.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: is damaged") from error
    if claimed != checksum(document):
        raise CheckpointError(f"{file}: is damaged: its checksum is wrong")
    if document.get("format") not in {WITHOUT_ARRAY_CHECKSUMS, FORMAT_VERSION}:
        raise CheckpointError(
            f"{file}: has format {document.get('format')}; this version reads formats up to {FORMAT_VERSION}"
        )
    manifest = checked(ManifestDocument, document, str(file))
    files = {str(name): Digest(each.sha256, each.size_bytes) for name, each in manifest.files.items()}
    return Manifest(manifest.step, files, document["summary"], manifest.format)


def read_checkpoint(path: Path, only: Iterable[str] = (*ARRAYS, *DOCUMENTS)) -> Stored:
    """Read all or some files of a checkpoint: JSON documents at once, arrays on demand.

    All data is verified when it is read; reading a damaged array later raises ``CheckpointError``.

    Raises:
        CheckpointError: A file is missing or does not match the manifest.
    """
    manifest = read_manifest(path)
    arrays: dict[str, StoredArrays] = {}
    documents: dict[str, Any] = {}
    for stem in only:
        if stem in DOCUMENTS:
            content = _read_checked(path, f"{stem}.json", manifest)
            documents[stem] = _parse_json(path / f"{stem}.json", content)
        elif names := _files_of(stem, manifest):
            arrays[stem] = StoredArrays(piece for name in names for piece in _pieces(path, name, manifest))
        elif stem not in OPTIONAL:
            raise CheckpointError(f"{path / stem}.safetensors: is not in the manifest")
    return Stored(arrays, documents, manifest.summary)


def _files_of(stem: str, manifest: Manifest) -> list[str]:
    pattern = re.compile(rf"{stem}(-\d{{5,}})?\.safetensors")
    return [name for name in manifest.files if pattern.fullmatch(name)]


def _pieces(path: Path, name: str, manifest: Manifest) -> list[Piece]:
    """Return the arrays of a file, to be read on demand. A file of format 1 is read and verified at once."""
    file, digest = path / name, manifest.files[name]
    if manifest.version == WITHOUT_ARRAY_CHECKSUMS:
        content = memoryview(_read_checked(path, name, manifest))
        header = bytes(content[: header_size_bytes(bytes(content[:8]), len(content))])
        return [
            Piece(entry, partial(_slice_of, content, entry), str(file))
            for entry in parse_header(header, len(content))
        ]
    with _opened(file, digest.size_bytes, exactly=True) as opened:
        header = _read_header(file, opened, digest)
    return [
        Piece(entry, partial(_read_entry, file, digest.size_bytes, entry), str(file))
        for entry in parse_header(header, digest.size_bytes)
    ]


def _slice_of(content: memoryview, entry: Entry) -> memoryview:
    return content[entry.begin : entry.begin + entry.size_bytes]


def _read_header(file: Path, opened: BinaryIO, digest: Digest) -> bytes:
    first = opened.read(8)
    header = first + _all_of(file, opened, header_size_bytes(first, digest.size_bytes) - 8)
    if hashlib.sha256(header).hexdigest() != digest.sha256:
        raise CheckpointError(f"{file}: is damaged: its checksum is wrong")
    return header


def _read_entry(file: Path, size_bytes: int, entry: Entry) -> bytes:
    with _opened(file, size_bytes, exactly=True) as opened:
        opened.seek(entry.begin)
        return _all_of(file, opened, entry.size_bytes)


def _parse_json(file: Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON: {error}") from error


def verify(path: Path, files: Iterable[str] | None = None) -> list[str]:
    """Verify some files of a checkpoint (None: all); return one message for each damaged file.

    Raises:
        OSError: A file exists but cannot be read; its content may be valid.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [error.message]
    problems = []
    for name in manifest.files if files is None else files:
        try:
            if name.endswith(".json"):
                _read_checked(path, name, manifest)
                continue
            for piece in _pieces(path, name, manifest):
                piece.checked_bytes()
        except CheckpointError as error:
            problems.append(error.message)
    return problems


def _read_checked(path: Path, name: str, manifest: Manifest) -> bytes:
    file = path / name
    if name not in manifest.files:
        raise CheckpointError(f"{file}: is not in the manifest")
    expected = manifest.files[name]
    content = _read_regular(file, expected.size_bytes, exactly=True)
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise CheckpointError(f"{file}: is damaged: its checksum is wrong")
    return content


def _read_regular(file: Path, size_bytes: int, *, exactly: bool = False) -> bytes:
    """Read a regular file; raises as ``_opened``."""
    with _opened(file, size_bytes, exactly=exactly) as opened:
        return _all_of(file, opened, size_bytes)


@contextmanager
def _opened(file: Path, size_bytes: int, *, exactly: bool) -> Iterator[BinaryIO]:
    """Open a regular file of at most ``size_bytes``; with ``exactly``, of this size.

    Raises:
        CheckpointError: The file is missing, a link, a pipe or a device, or has another size.
        OSError: The file exists but cannot be read.
    """
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would block.
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: is missing") from error
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.ENOTDIR}:
            raise CheckpointError(f"{file}: is a symbolic link, or not a regular file") from error
        raise
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise CheckpointError(f"{file}: is not a regular file")
    with os.fdopen(handle, "rb") as opened:
        if found.st_size > size_bytes or (exactly and found.st_size != size_bytes):
            wanted = f"instead of {size_bytes}" if exactly else f"which exceeds the limit of {size_bytes}"
            raise CheckpointError(f"{file}: has {found.st_size} bytes {wanted}")
        yield opened


def _all_of(file: Path, opened: BinaryIO, size_bytes: int) -> bytes:
    try:
        return opened.read(size_bytes)
    except MemoryError as error:
        raise CheckpointError(f"{file}: {size_bytes} bytes do not fit into memory") from error


def checksum(document: object) -> str:
    """Return the checksum of a manifest, which the manifest itself contains."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
