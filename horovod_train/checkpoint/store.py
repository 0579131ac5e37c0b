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
``model-00003.safetensors``; arrays of the same name are shards of one tensor (see ``arrays.py``).

A checkpoint is written under a temporary name, flushed, and renamed, so readers see it complete or not at
all. The next run that opens the folder for writing removes temporary folders that remain after a crash.

Checksums detect changes of a file after it was written. They do not show that this product wrote it.

    ManifestDocument, StateDocument, ...   schemas with which the JSON files of a checkpoint are validated
                                           before their content is used
    list_checkpoints, read_checkpoint      checkpoints of a folder, and the content of one
    verify, quarantine, remove             verification, and treatment of damaged and old checkpoints
    newest_valid                           selection of the checkpoint to resume from, the newest with valid
                                           checksums; every rank must call it
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from horovod_train.checkpoint.arrays import (
    Digest,
    Entry,
    Piece,
    StoredArrays,
    header_size_bytes,
    parse_header,
)
from horovod_train.collectives.base import Communicator, allgather_json, broadcast_json
from horovod_train.errors import CheckpointError

FileName = Annotated[
    str,
    Field(pattern=r"^((model|optimizer)(-[0-9]{5,7})?|rng|own)\.safetensors$|^(state|config)\.json$"),
]
Count = Annotated[int, Field(ge=0, le=10**12 - 1)]


class _Document(BaseModel):
    # Fields of later versions are accepted.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class DigestDocument(_Document):
    """Checksum and size of a file, as stored in a manifest."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Field(ge=0, le=2**60)]


class SummaryDocument(_Document):
    """Values that lists of checkpoints show."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    epochs: Annotated[float, Field(ge=0)]
    metrics: dict[str, float]
    unix_time_s: float
    world_size: Annotated[int, Field(ge=1, le=10**7)]


class ManifestDocument(_Document):
    """``manifest.json``, without its own checksum."""

    format: int
    step: Count
    files: dict[FileName, DigestDocument]
    summary: SummaryDocument

    @model_validator(mode="after")
    def _has_a_model(self) -> ManifestDocument:
        if missing := {"state.json", "config.json"} - self.files.keys():
            raise ValueError(f"files: {min(missing)} is missing")
        if not any(name.startswith("model") for name in self.files):
            raise ValueError("files: no model")
        return self


class OrderDocument(_Document):
    """Settings that determine the order of samples."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    num_samples: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0)]
    shuffle: bool
    kind: Literal["permutation", "files"] = "permutation"
    num_in_pass: Annotated[int, Field(ge=0)] = 0
    row_size: Annotated[int, Field(ge=0)] = 0
    digest: str = ""


class PlateauDocument(_Document):
    """State of ``decay: plateau``."""

    factor: Annotated[float, Field(ge=0, le=1)]
    best: float | None
    num_without_improvement: Annotated[int, Field(ge=0)]
    cooldown: Annotated[int, Field(ge=0)]


class NoiseDocument(_Document):
    """Averages of the gradient noise."""

    covariances: list[float]
    square_norms: list[float]
    num_measured: Annotated[int, Field(ge=0)]


class PassedIntervalsDocument(_Document):
    """How often the interval of evaluations had passed at the last evaluation."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    interval: str
    number: Annotated[int, Field(ge=0)]


class ProgressDocument(_Document):
    """Progress of training."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    order: OrderDocument
    step: Count
    epoch: Count
    cursor: Annotated[int, Field(ge=0)]
    metrics: dict[str, float]
    metrics_step: Annotated[int, Field(ge=-1)]
    best_metric: float | None
    num_without_improvement: Annotated[int, Field(ge=0)]
    stopped_early: bool
    plateau: PlateauDocument | None = None
    noise: NoiseDocument | None = None
    scaled_epochs: Annotated[float, Field(ge=0)] | None = None
    evaluation: PassedIntervalsDocument | None = None
    epochs_of_steps: dict[str, Annotated[float, Field(ge=0)]] | None = None
    skipped: list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]] = []
    """These fields are absent in checkpoints of former versions."""


class ResumeDocument(_Document):
    """A resume of training from a checkpoint."""

    checkpoint: str
    unix_time_s: float
    world_size: int
    changes: list[str]

    def as_text(self) -> str:
        """Return a human-readable line."""
        changes = "; ".join(self.changes) or "nothing was changed"
        return f"resumed from {self.checkpoint} on {self.world_size} rank(s): {changes}"


class StateDocument(_Document):
    """``state.json``. Earlier versions do not write the fields that have defaults."""

    progress: ProgressDocument
    optimizer_tree: Any
    scaler: dict[str, float]
    environment: dict[str, str] = {}
    """Versions and digests of code of the run that wrote the checkpoint."""
    history: list[ResumeDocument] = []
    """The latest resumes of this training, up to ``manager.MAX_HISTORY``, with their changes."""


Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], document: object, what: str) -> Model:
    """Validate a parsed JSON document, which error messages call ``what``, with a pydantic model.

    Raises:
        CheckpointError: The document is invalid; the message names the first invalid field.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise CheckpointError(f"{what}: has an invalid field: {where}: {first['msg']}") from None


FORMAT_VERSION = 3
"""Format version 3 is that of orders of samples that version 2 does not know; all others have version 2."""
WITHOUT_KINDS_OF_ORDER = 2
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


def format_of(state: Mapping[str, Any]) -> int:
    """Return the format version of a checkpoint: the lowest whose readers know all its fields."""
    known = {"num_samples", "seed", "shuffle"}
    progress = state.get("progress", {})
    is_new = progress.get("order", {}).keys() - known or "skipped" in progress
    return FORMAT_VERSION if is_new else WITHOUT_KINDS_OF_ORDER


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
    if document.get("format") not in range(WITHOUT_ARRAY_CHECKSUMS, FORMAT_VERSION + 1):
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


log = logging.getLogger(__name__)

Damaged = tuple[StoredCheckpoint, list[str]]


def newest_valid(directory: Path, world: Communicator) -> tuple[str | None, str]:
    """Return the name of the newest valid checkpoint, or None; and the problem that prevents a start, if any.

    Newer damaged checkpoints are quarantined, because they would count as the newest ones when old ones are
    removed. If all are damaged, nothing is renamed and a problem is returned, at every start of the job: only
    the user may decide to train from the beginning.
    """
    found, problem = _listed(directory, world)
    damaged: list[Damaged] = []
    for checkpoint in found:
        problems, problem = _problems_of(checkpoint.path, world)
        if problem:
            break
        if not problems:
            if world.rank == 0:
                _quarantine(damaged)
                if checkpoint.name != (own_name := f"step-{checkpoint.step:012d}"):
                    log.warning("%s is %s, by its manifest", checkpoint.name, own_name)
            return checkpoint.name, ""
        damaged.append((checkpoint, problems))
    if problem:
        return None, f"{directory} cannot be read: {problem}"
    return None, str(broadcast_json(world, _why_none(directory, damaged) if world.rank == 0 else ""))


def _listed(directory: Path, world: Communicator) -> tuple[list[StoredCheckpoint], str]:
    """Return the checkpoints that rank 0 lists, and the error if it cannot list them."""
    found: list[StoredCheckpoint] = []
    problem = ""
    if world.rank == 0:
        try:
            found = list_checkpoints(directory)
        except OSError as error:
            problem = error.strerror or str(error)
    listed, problem = broadcast_json(world, [[[each.name, each.step] for each in found], problem])
    return [StoredCheckpoint(directory / name, step) for name, step in listed], problem


def _why_none(directory: Path, damaged: Sequence[Damaged]) -> str:
    quarantined = list_damaged(directory)
    if not damaged and not quarantined:
        return ""
    count = len(damaged) + len(quarantined)
    first = damaged[0][1][0] if damaged else f"{quarantined[-1].name} was quarantined before"
    return f"all {count} checkpoints in {directory} are damaged, the newest: {first}"


def _problems_of(path: Path, world: Communicator) -> tuple[list[str], str]:
    """Return damage of a checkpoint, and the error if rank 0 cannot read a file; each rank verifies a part.

    If another rank finds damage, rank 0 verifies that rank's files again: hosts may have different folders
    under this path, which is not damage.
    """
    files: list[str] = []
    problems: list[str] = []
    unreadable = ""
    if world.rank == 0:
        try:
            files = list(read_manifest(path).files)
        except CheckpointError as error:
            problems = [error.message]
        except OSError as error:
            unreadable = error.strerror or str(error)
    files, problems, unreadable = broadcast_json(world, [files, problems, unreadable])
    if problems or unreadable:
        return problems, unreadable
    mine = files[world.rank :: world.size]
    problems, unreadable = _verified(path, mine)
    suspicious = allgather_json(world, mine if (problems or unreadable) and world.rank else [])
    if world.rank == 0 and any(suspicious) and not unreadable:
        of_others, unreadable = _verified(path, [file for found in suspicious for file in found])
        problems += of_others
    problems, unreadable = broadcast_json(world, [problems, unreadable])
    return problems, unreadable


def _verified(path: Path, files: Sequence[str]) -> tuple[list[str], str]:
    try:
        return verify(path, files), ""
    except OSError as error:
        return [], error.strerror or str(error)


def _quarantine(damaged: Sequence[Damaged]) -> None:
    for checkpoint, problems in damaged:
        quarantined = quarantine(checkpoint.path, DAMAGED)
        log.warning("skipping %s (kept as %s): %s", checkpoint.name, quarantined.name, "; ".join(problems))
