"""Checkpoints as folders: written whole or not at all, and never believed without a checksum.

    <dir>/step-000000000120/
        manifest.json              what is here: sizes, SHA-256, progress, metrics; its own checksum
        model.safetensors          weights and buffers
        optimizer.safetensors      optimizer state
        rng.safetensors            random generators, one array of bytes for each rank
        own.safetensors            what else a rank alone has, in the same way; absent where there is nothing
        state.json                 progress, loss scaler, shape of the optimizer's state
        config.json                the resolved job

A checkpoint is written under a temporary name, flushed, and renamed. Readers see it complete or
not at all; what a crash leaves behind is swept away by the next writer.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from horovod_train.checkpoint.arrays import ArrayBlob, Digest, parse_arrays, write_arrays, write_parts
from horovod_train.checkpoint.schema import ManifestDocument, checked
from horovod_train.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
DAMAGED = "damaged"
ARRAY_FILES = ("model", "optimizer", "rng", "own")
OPTIONAL_FILES = ("own",)
JSON_FILES = ("state", "config")
_NAME = re.compile(r"^step-(\d{12})$")
MAX_MANIFEST_BYTES = 16 * 2**20
_TEMPORARY = ".writing-"
_REPLACED = ".replaced-"


@dataclass(frozen=True)
class Content:
    """Everything in a checkpoint.

    Attributes:
        arrays: For each of ``model``, ``optimizer`` and ``rng``, and where there is some ``own``, arrays by
            name.
        documents: For each of ``state`` and ``config``, plain JSON.
        summary: What lists show: epoch, metrics, world size, time.
    """

    arrays: Mapping[str, Mapping[str, ArrayBlob]]
    documents: Mapping[str, Any]
    summary: Mapping[str, object]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    files: Mapping[str, Digest]
    summary: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(digest.size_bytes for digest in self.files.values())


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint's place; says nothing of whether it is valid.

    Attributes:
        path: Its folder.
        step: What its manifest says, or where that cannot be read, its name.
    """

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
        StoredCheckpoint(path, _step_of(path, int(match[1])))
        for path in directory.iterdir()
        if (match := _NAME.match(path.name))
    ]
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.name), reverse=True)


def _step_of(path: Path, by_name: int) -> int:
    """Return a checkpoint's step. A folder can be renamed; its manifest has a checksum."""
    try:
        return read_manifest(path).step
    except (CheckpointError, OSError):
        return by_name


def list_damaged(directory: Path) -> list[Path]:
    """Return what was set aside as damaged."""
    return sorted(path for path in directory.glob(f"{DAMAGED}-*-step-*") if path.is_dir())


def write_checkpoint(directory: Path, step: int, content: Content) -> Manifest:
    """Write a checkpoint, flushed to disk, under its final name.

    Raises:
        CheckpointError: The disk refuses; nothing then stands under the final name.
    """
    final = directory / f"step-{step:012d}"
    temporary = directory / f"{_TEMPORARY}{final.name}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        manifest = _write_files(temporary, step, content)
        _flush_folder(temporary)
        _rename_over(temporary, final, step)
        _flush_folder(directory)
    except CheckpointError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write {final}: {error.strerror or error}", hint="check space and rights of the folder"
        ) from error
    return manifest


def remove_leftovers(directory: Path) -> None:
    """Remove what an interrupted writer left behind. Only the one writer of a folder may call it."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(f"{_REPLACED}*"):
        original = directory / path.name.removeprefix(_REPLACED)
        if original.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(original)


def remove(checkpoint: StoredCheckpoint) -> None:
    """Remove a checkpoint: first from sight, then from the disk."""
    doomed = checkpoint.path.with_name(f"{_TEMPORARY}removed-{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def quarantine(path: Path, reason: str) -> Path:
    """Rename the folder of a checkpoint so that it is no longer listed, and return its new place."""
    number = 1
    while (aside := path.with_name(f"{reason}-{number}-{path.name}")).exists():
        number += 1
    path.rename(aside)
    return aside


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of a format this version does not know.
        OSError: It is there and cannot be read.
    """
    file = path / MANIFEST
    try:
        document = json.loads(_read_regular(file, MAX_MANIFEST_BYTES))
        claimed = document.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: is damaged") from error
    if claimed != _checksum(document):
        raise CheckpointError(f"{file}: is damaged: its checksum is wrong")
    if document.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: has format {document.get('format')}; this version reads format {FORMAT_VERSION}"
        )
    manifest = checked(ManifestDocument, document, str(file))
    files = {str(name): Digest(each.sha256, each.size_bytes) for name, each in manifest.files.items()}
    return Manifest(manifest.step, files, document["summary"])


def read_checkpoint(path: Path, only: Iterable[str] = (*ARRAY_FILES, *JSON_FILES)) -> Content:
    """Read a checkpoint, or some of its files, checking every byte that is read.

    Raises:
        CheckpointError: A file is missing or is not what the manifest says.
    """
    manifest = read_manifest(path)
    arrays: dict[str, Mapping[str, ArrayBlob]] = {}
    documents: dict[str, Any] = {}
    for stem in only:
        if stem in OPTIONAL_FILES and f"{stem}.safetensors" not in manifest.files:
            continue
        if stem in ARRAY_FILES:
            arrays[stem] = parse_arrays(_read_checked(path, f"{stem}.safetensors", manifest))
        else:
            content = _read_checked(path, f"{stem}.json", manifest)
            documents[stem] = _parse_json(path / f"{stem}.json", content)
    return Content(arrays, documents, manifest.summary)


def _parse_json(file: Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON: {error}") from error


def verify(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint: a sentence for each damaged file; empty when valid.

    Raises:
        OSError: A file is there and cannot be read, which says nothing about what is in it.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [error.message]
    problems = []
    for name in manifest.files:
        try:
            _read_checked(path, name, manifest)
        except CheckpointError as error:
            problems.append(error.message)
    return problems


def _write_files(folder: Path, step: int, content: Content) -> Manifest:
    files = {}
    for stem, arrays in content.arrays.items():
        files[f"{stem}.safetensors"] = write_arrays(folder / f"{stem}.safetensors", arrays)
    for stem, document in content.documents.items():
        text = json.dumps(document, indent=1).encode()
        files[f"{stem}.json"] = write_parts(folder / f"{stem}.json", [text])
    document = {
        "format": FORMAT_VERSION,
        "step": step,
        "summary": dict(content.summary),
        "files": {name: asdict(digest) for name, digest in files.items()},
    }
    signed = json.dumps({**document, "sha256": _checksum(document)}, indent=1).encode()
    write_parts(folder / MANIFEST, [signed])
    return Manifest(step, files, content.summary)


def _rename_over(temporary: Path, final: Path, step: int) -> None:
    """Rename a folder; an old one of that name (a damaged one, usually) makes way first."""
    replaced = final.with_name(_REPLACED + final.name)
    if final.exists() and _step_of(final, step) != step:
        quarantine(final, "renamed")  # somebody's copy of another step
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


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
    """Read a file that is no link, pipe or device, and not larger than it should be.

    Raises:
        CheckpointError: It is missing, or something else.
        OSError: It is there and cannot be read.
    """
    try:
        # Without O_NONBLOCK, a pipe that nobody writes to would be waited for.
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: is missing") from error
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.ENOTDIR}:
            raise CheckpointError(f"{file}: is a link or no file") from error
        raise
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise CheckpointError(f"{file}: is not a regular file")
    with os.fdopen(handle, "rb") as opened:
        if found.st_size > size_bytes or (exactly and found.st_size != size_bytes):
            wanted = f"instead of {size_bytes}" if exactly else f"where {size_bytes} is the limit"
            raise CheckpointError(f"{file}: has {found.st_size} bytes {wanted}")
        try:
            return opened.read(size_bytes)
        except MemoryError as error:
            raise CheckpointError(f"{file}: {size_bytes} bytes do not fit into memory") from error


def _checksum(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _flush_folder(folder: Path) -> None:
    """Make names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
