"""Writing a checkpoint: begun under a temporary name, flushed, and renamed when all of it is there.

Where ranks share a model, each writes its own files into the folder that rank 0 has begun. They write in the
background and cannot ask each other there. A rank that is done leaves a note next to its files; rank 0
waits for the notes of all writers, unless one of them reports a failure, and renames the folder.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from horovod_train.checkpoint import store
from horovod_train.checkpoint.arrays import ArrayBlob, Digest, write_arrays, write_bytes
from horovod_train.errors import CheckpointError, describe_ranks

SHARED = ("model", "optimizer")
"""What several ranks may write, into files with their numbers."""
POLL_S = 0.02
MAX_POLL_S = 1.0
_NOTE = ".written-"


@dataclass(frozen=True)
class Content:
    """What a rank writes of a checkpoint.

    Attributes:
        arrays: For each of ``model``, ``optimizer`` and ``rng``, and where there is some ``own``, arrays by
            name.
        documents: For each of ``state`` and ``config``, plain JSON.
        summary: What lists show: epoch, metrics, world size, time.
    """

    arrays: Mapping[str, Mapping[str, ArrayBlob]]
    documents: Mapping[str, Any]
    summary: Mapping[str, object]


def temporary_name(step: int) -> str:
    """Return the name of the folder in which this process begins a checkpoint."""
    return f"{store.TEMPORARY}step-{step:012d}-{os.getpid()}"


def begin(temporary: Path) -> None:
    """Make the folder in which a checkpoint is written.

    Raises:
        CheckpointError: The disk refuses.
    """
    with _explained(temporary):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()


def write_files(temporary: Path, content: Content, rank: int | None = None) -> dict[str, Digest]:
    """Write one rank's files of a checkpoint, flushed to disk; return what a manifest says of them.

    Args:
        temporary: The folder that was begun.
        content: What this rank writes of it.
        rank: Names its files; None: it is the only one that writes.

    Raises:
        CheckpointError: The disk refuses, or an array cannot be saved.
    """
    number = "" if rank is None else f"-{rank:05d}"
    files: dict[str, Digest] = {}
    with _explained(temporary):
        for stem, arrays in content.arrays.items():
            if rank and not arrays:
                continue  # nothing that no rank before has, too
            # Those of all ranks that one rank has written have no number.
            name = f"{stem}{number if stem in SHARED else ''}.safetensors"
            files[name] = write_arrays(temporary / name, arrays)
        for stem, document in content.documents.items():
            name = f"{stem}.json"
            files[name] = write_bytes(temporary / name, json.dumps(document, indent=1).encode())
    return files


def commit(
    temporary: Path, step: int, files: Mapping[str, Digest], summary: Mapping[str, object]
) -> store.Manifest:
    """Give a checkpoint whose files are all written its manifest and its final name.

    Raises:
        CheckpointError: The disk refuses; nothing then stands under the final name.
    """
    final = temporary.with_name(f"step-{step:012d}")
    document = {
        "format": store.FORMAT_VERSION,
        "step": step,
        "summary": dict(summary),
        "files": {name: asdict(digest) for name, digest in files.items()},
    }
    signed = json.dumps({**document, "sha256": store.checksum(document)}, indent=1).encode()
    with _explained(temporary):
        write_bytes(temporary / store.MANIFEST, signed)
        _flush_folder(temporary)
        _rename_over(temporary, final, step)
        _flush_folder(final.parent)
    return store.Manifest(step, files, summary)


class Writing:
    """A checkpoint that is being written, as one of its writers sees it.

    Args:
        step: Optimizer steps made.
        folder: Begun by rank 0.
        writers: The ranks that write to it, rank 0 first.
    """

    def __init__(self, step: int, folder: Path, writers: Sequence[int]) -> None:
        self.step = step
        self.folder = folder
        self.writers = writers
        self._problem: str | None = None
        self._give_up_at_s = math.inf

    def write_part(self, rank: int, content: Content) -> None:
        """Write this rank's files, and leave a note.

        Raises:
            CheckpointError: They could not be written.
            OSError: That could not be noted.
        """
        try:
            files = write_files(self.folder, content, rank)
        except CheckpointError as error:
            with suppress(OSError):  # if the disk refuses this, too, the ranks tell each other
                write_note(self.folder, rank, {}, error.message)
            raise
        write_note(self.folder, rank, files)

    def complete(self, content: Content) -> store.Manifest:
        """Write rank 0's files, wait for those of other writers, and give the checkpoint its name.

        Raises:
            CheckpointError: It could not be written; nothing is left.
            OSError: A note could not be read.
        """
        is_alone = len(self.writers) == 1
        with removed_if_it_fails(self.folder):
            files = write_files(self.folder, content, None if is_alone else 0)
            files |= gather_notes(self.folder, self.writers[1:], self._why_none_will_come)
            return commit(self.folder, self.step, files, content.summary)

    def fail(self, problem: str) -> None:
        """Another writer has failed."""
        self._problem = problem

    def remove(self) -> None:
        """Remove what is left of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def give_up_after(self, seconds: float) -> None:
        """Wait for others so long at most."""
        self._give_up_at_s = monotonic() + seconds

    def _why_none_will_come(self) -> str | None:
        if monotonic() > self._give_up_at_s:
            return "training has ended, and they were waited for in vain"
        return self._problem


def write_note(folder: Path, rank: int, files: Mapping[str, Digest], error: str = "") -> None:
    """Note that a rank has written its files, or that it could not.

    Raises:
        OSError: The disk refuses.
    """
    unfinished = folder / f".unfinished-{rank}"
    known = {name: asdict(digest) for name, digest in files.items()}
    unfinished.write_text(json.dumps({"files": known, "error": error}))
    unfinished.rename(folder / f"{_NOTE}{rank}")


def gather_notes(
    folder: Path, ranks: Collection[int], problem: Callable[[], str | None]
) -> dict[str, Digest]:
    """Wait until each of these ranks has left its note; return what all notes say, and remove them.

    Args:
        folder: Where they are left.
        ranks: Who leaves one.
        problem: Returns why one will never come; None: nothing is known against it.

    Raises:
        CheckpointError: A rank has failed, or one will never come.
        OSError: A note cannot be read.
    """
    files: dict[str, Digest] = {}
    missing = set(ranks)
    pause_s = POLL_S
    while missing:
        # A list of a folder is new, where a name that was not there may be remembered as missing (NFS).
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
def removed_if_it_fails(temporary: Path) -> Iterator[None]:
    """Remove what was begun, should the block fail."""
    try:
        yield
    except CheckpointError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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
    """Rename a folder; an old one of that name (a damaged one, usually) makes way first."""
    replaced = final.with_name(store.REPLACED + final.name)
    if final.exists() and store.step_of(final, step) != step:
        store.quarantine(final, "renamed")  # a user's copy of another step
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    """Make names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
