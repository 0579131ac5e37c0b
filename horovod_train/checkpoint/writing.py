"""Writing of a checkpoint under a temporary name, which is flushed and renamed when it is complete.

If the model is sharded, several ranks write files into the folder that rank 0 has created. They write in a
background thread, where collectives are not available. Each of the other writers therefore leaves a note, a
small file, when it has finished. Rank 0 waits for all notes and renames the folder, unless a note or a
collective of the main thread reports an error.

``WriteReport`` is the result of an attempt to write a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from horovod_train.checkpoint import store
from horovod_train.checkpoint.arrays import ArrayBlob, Digest, write_arrays, write_bytes
from horovod_train.errors import CheckpointError, describe_ranks

SHARED = ("model", "optimizer")
"""Sections that several ranks may write, into files with their ranks in the names."""
POLL_S = 0.02
MAX_POLL_S = 1.0
_NOTE = ".written-"


@dataclass(frozen=True)
class Content:
    """Content that a rank writes to a checkpoint.

    Attributes:
        arrays: Arrays by name, for ``model`` and ``optimizer``; on rank 0 also ``rng`` and, if any, ``own``.
        documents: Plain JSON of ``state`` and ``config``; empty on ranks other than 0.
        summary: Values that lists of checkpoints show; empty on ranks other than 0.
    """

    arrays: Mapping[str, Mapping[str, ArrayBlob]]
    documents: Mapping[str, Any]
    summary: Mapping[str, object]


def temporary_name(step: int) -> str:
    """Return the name of the temporary folder in which this process writes a checkpoint."""
    return f"{store.TEMPORARY}step-{step:012d}-{os.getpid()}"


def begin(temporary: Path) -> None:
    """Create the temporary folder of a checkpoint; raises ``CheckpointError`` if that fails."""
    with _explained(temporary):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()


def write_files(temporary: Path, content: Content, rank: int | None = None) -> dict[str, Digest]:
    """Write and flush one rank's files; return their manifest entries. ``rank`` None: it is the only writer.

    Raises:
        CheckpointError: A file cannot be written, or an array has an unsupported element type.
    """
    number = "" if rank is None else f"-{rank:05d}"
    files: dict[str, Digest] = {}
    with _explained(temporary):
        for stem, arrays in content.arrays.items():
            if rank and not arrays:
                continue  # lower ranks write all arrays that this rank has
            # Rank 0 writes the sections `rng` and `own` for all ranks: no rank in their names.
            name = f"{stem}{number if stem in SHARED else ''}.safetensors"
            files[name] = write_arrays(temporary / name, arrays)
        for stem, document in content.documents.items():
            name = f"{stem}.json"
            files[name] = write_bytes(temporary / name, json.dumps(document, indent=1).encode())
    return files


def commit(temporary: Path, step: int, files: Mapping[str, Digest], content: Content) -> store.Manifest:
    """Write the manifest of a checkpoint whose files are complete, and rename its folder to the final name.

    Raises:
        CheckpointError: The manifest cannot be written, or the folder cannot be renamed.
    """
    final = temporary.with_name(f"step-{step:012d}")
    document = {
        "format": store.format_of(content.documents["state"]),
        "step": step,
        "summary": dict(content.summary),
        "files": {name: asdict(digest) for name, digest in files.items()},
    }
    signed = json.dumps({**document, "sha256": store.checksum(document)}, indent=1).encode()
    with _explained(temporary):
        write_bytes(temporary / store.MANIFEST, signed)
        _flush_folder(temporary)
        _rename_over(temporary, final, step)
        _flush_folder(final.parent)
    return store.Manifest(step, files, content.summary)


class Writing:
    """A write in progress to a temporary folder that rank 0 has created. ``writers`` begins with rank 0."""

    def __init__(self, step: int, folder: Path, writers: Sequence[int]) -> None:
        self.step = step
        self.folder = folder
        self.writers = writers
        self._problem: str | None = None
        self._give_up_at_s = math.inf

    def write_part(self, rank: int, content: Content) -> None:
        """Write the files of a rank other than 0, then its note.

        Raises:
            CheckpointError: The files could not be written.
            OSError: The note could not be written.
        """
        try:
            files = write_files(self.folder, content, rank)
        except CheckpointError as error:
            with suppress(OSError):  # the manager also reports the error in a collective
                write_note(self.folder, rank, {}, error.message)
            raise
        write_note(self.folder, rank, files)

    def complete(self, content: Content) -> store.Manifest:
        """Write the files of rank 0, wait for those of other writers, and commit the checkpoint.

        Raises:
            CheckpointError: The checkpoint could not be written; its temporary folder is removed.
            OSError: A note could not be read.
            ValueError: A note is damaged.
        """
        is_alone = len(self.writers) == 1
        with ExitStack() as on_error:
            on_error.callback(self.remove)
            files = write_files(self.folder, content, None if is_alone else 0)
            files |= gather_notes(self.folder, self.writers[1:], self._why_none_will_come)
            manifest = commit(self.folder, self.step, files, content)
            on_error.pop_all()
        return manifest

    def fail(self, problem: str) -> None:
        """Report that another writer has failed, which ends the wait for notes; thread-safe."""
        self._problem = problem

    def remove(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def give_up_after(self, seconds: float) -> None:
        """Limit the wait for other writers to this time from now."""
        self._give_up_at_s = monotonic() + seconds

    def _why_none_will_come(self) -> str | None:
        if monotonic() > self._give_up_at_s:
            return "no result within the time after the end of training"
        return self._problem


def write_note(folder: Path, rank: int, files: Mapping[str, Digest], error: str = "") -> None:
    """Write a rank's note: the manifest entries of its files, or its error. Raises ``OSError``."""
    unfinished = folder / f".unfinished-{rank}"
    known = {name: asdict(digest) for name, digest in files.items()}
    unfinished.write_text(json.dumps({"files": known, "error": error}))
    unfinished.rename(folder / f"{_NOTE}{rank}")


def gather_notes(
    folder: Path, ranks: Collection[int], problem: Callable[[], str | None]
) -> dict[str, Digest]:
    """Wait for the notes of ranks, and remove them; return the manifest entries of all their files.

    ``problem`` is polled. It returns the reason to stop waiting; None: continue.

    Raises:
        CheckpointError: A rank has reported an error, or ``problem`` has returned a reason.
        OSError: A note cannot be read.
    """
    files: dict[str, Digest] = {}
    missing = set(ranks)
    pause_s = POLL_S
    while missing:
        # List the folder, because NFS clients cache the absence of a name that was looked up before.
        present = {path.name for path in folder.iterdir()}
        for rank in sorted(missing):
            if (name := f"{_NOTE}{rank}") in present:
                note = json.loads((folder / name).read_text())
                if note["error"]:
                    raise CheckpointError(f"{describe_ranks([rank])}: {note['error']}")
                files.update({file: Digest(**digest) for file, digest in note["files"].items()})
                (folder / name).unlink()
                missing.remove(rank)
        if missing and (why := problem()) is not None:
            raise CheckpointError(f"{describe_ranks(sorted(missing))} did not write: {why}")
        if missing:
            sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_S)
    return files


@contextmanager
def _explained(temporary: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = temporary.name.removeprefix(store.TEMPORARY).rpartition("-")[0]  # without the process
        raise CheckpointError(
            f"cannot write {temporary.with_name(name)}: {error.strerror or error}",
            hint="check space and rights of the folder",
        ) from error


def _rename_over(temporary: Path, final: Path, step: int) -> None:
    """Rename the temporary folder, and replace an existing checkpoint of this step, usually a damaged one."""
    replaced = final.with_name(store.REPLACED + final.name)
    if final.exists() and store.step_of(final, step) != step:
        store.quarantine(final, "renamed")  # a copy of another step, renamed by a user
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, so that they survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class WriteReport:
    """Result of an attempt to write a checkpoint.

    Attributes:
        step: Optimizer step of the checkpoint.
        seconds: Time for writing and flushing.
        size_bytes: Size of its files, without the manifest; 0 after an error.
        error: Reason why it was not written; empty: it was written.
    """

    step: int
    path: str
    seconds: float
    size_bytes: int
    error: str = ""
