"""List, describe, export and compare checkpoints.

    checkpoints_in, describe_row   the checkpoints of a folder, and the line of each in a list
    describe                       description of a checkpoint
    export                         weights and buffers as one safetensors file
    differences                    differences of two checkpoints
    open_weights                   weights in safetensors files of other programs, read on demand

No function imports a framework.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from time import localtime, strftime
from typing import Any

import numpy as np
import numpy.typing as npt

from horovod_train.checkpoint.arrays import (
    ArrayBlob,
    Entry,
    Piece,
    StoredArrays,
    header_size_bytes,
    parse_header,
    write_plain,
)
from horovod_train.checkpoint.manager import document_changes
from horovod_train.checkpoint.store import (
    StateDocument,
    StoredCheckpoint,
    checked,
    list_checkpoints,
    list_damaged,
    read_checkpoint,
    read_manifest,
    verify,
)
from horovod_train.errors import CheckpointError, UserError

MAX_ROWS = 40


def checkpoints_in(path: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints of a checkpoint folder or of a run folder, newest first."""
    return list_checkpoints(path) or list_checkpoints(path / "checkpoints")


def discard_damaged(path: Path) -> list[Path]:
    """Delete damaged checkpoints of a checkpoint folder or run folder; return the deleted folders."""
    damaged = [checkpoint.path for checkpoint in checkpoints_in(path) if verify(checkpoint.path)]
    damaged += [*list_damaged(path), *list_damaged(path / "checkpoints")]
    for folder in damaged:
        shutil.rmtree(folder)
    return damaged


def describe_row(checkpoint: StoredCheckpoint) -> str:
    """Return a checkpoint's line of ``checkpoint ls``."""
    try:
        manifest = read_manifest(checkpoint.path)
    except CheckpointError as error:
        return f"{checkpoint.name}  DAMAGED  {error.message}"
    summary = manifest.summary
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in summary["metrics"].items())
    when = strftime("%Y-%m-%d %H:%M:%S", localtime(summary["unix_time_s"]))
    return (
        f"{checkpoint.name}  epoch {summary['epochs']:<8.3f} {manifest.size_bytes / 1e6:8.2f} MB  "
        f"{summary['world_size']} rank(s)  {when}  {metrics}"
    ).rstrip()


def describe(path: Path) -> str:
    """Return a human-readable description of a checkpoint, without the elements of its arrays.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    manifest = read_manifest(path)
    content = read_checkpoint(path)
    state = checked(StateDocument, content.documents["state"], f"{path / 'state.json'}")
    kinds = ((name, content.arrays["model"].kind(name)) for name in content.arrays["model"])
    progress = content.documents["state"]["progress"]
    lines = [
        f"{path.name}: step {progress['step']}, epoch {progress['epoch']}",
        f"samples of this epoch: {progress['cursor']} of {progress['order']['num_samples']} used",
        f"world size {manifest.summary['world_size']}",
        *(f"{name}: {value:.6g}" for name, value in manifest.summary["metrics"].items()),
        *(entry.as_text() for entry in state.history),
        "files:",
        *(
            f"  {name:<24} {digest.size_bytes:>12} bytes  sha256 {digest.sha256}"
            for name, digest in manifest.files.items()
        ),
        "weights and buffers:",
        *(f"  {name:<40} {dtype} {list(shape)}" for name, (dtype, shape) in kinds),
    ]
    return "\n".join(lines)


def export(path: Path, file: Path, *, averaged: bool | None = None) -> tuple[StoredCheckpoint, int, bool]:
    """Write the weights and buffers of the newest valid checkpoint to one safetensors file.

    The names are those of the model, for every strategy. One array is in memory at a time.

    Args:
        path: Checkpoint folder, run folder, or one checkpoint.
        file: Path of a file that must not exist.
        averaged: True: averaged weights (``ema``, or those with which the optimizer evaluates). False: the
            trained weights. None: those that were evaluated.

    Returns:
        The checkpoint, the size of the file in bytes, and whether the weights are averaged ones.

    Raises:
        CheckpointError: There is no valid checkpoint, it has no averaged weights although ``averaged`` is
            True, or the file exists or cannot be written.
    """
    candidates = checkpoints_in(path) or [StoredCheckpoint(path, 0)]
    found = next((each for each in candidates if not verify(each.path)), None)
    if found is None:
        raise CheckpointError(
            f"{path} has no valid checkpoint", hint="name the folder of a run, such as runs/<name>"
        )
    model, is_averaged = _weights_of(found.path, averaged=averaged)
    temporary = file.with_name(f".{file.name}-{os.getpid()}")
    try:
        if file.exists():
            raise CheckpointError(f"{file} already exists", hint="give another name, or remove it")
        size_bytes = write_plain(temporary, model, {name: model.kind(name) for name in model})
        temporary.rename(file)
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return found, size_bytes, is_averaged


def _weights_of(path: Path, *, averaged: bool | None) -> tuple[StoredArrays, bool]:
    """Return weights and buffers of a checkpoint by name, and whether they are averaged ones."""
    content = read_checkpoint(path, ["model", "optimizer", "state"])
    model, optimizer = content.arrays["model"], content.arrays["optimizer"]
    tree = content.documents["state"]["optimizer_tree"]
    found = tree.get("averaged") if isinstance(tree, dict) else None
    if averaged and found is None:
        raise CheckpointError(
            f"{path.name} has no averaged weights",
            hint="train with `ema` in the job, or export without --averaged",
        )
    is_wanted = averaged or (averaged is None and found is not None and found["is_default"])
    if not is_wanted:
        return model, False
    prefix = "averaged.weights."
    averages = {n.removeprefix(prefix): optimizer.pieces(n) for n in optimizer if n.startswith(prefix)}
    return model.replaced(averages), True


def differences(first: Path, second: Path) -> list[str]:
    """Return a line for each difference of two checkpoints, without ``rng`` and ``own``; at most 41 lines.

    Raises:
        CheckpointError: A checkpoint is damaged.
    """
    one, two = read_checkpoint(first), read_checkpoint(second)
    lines: list[str] = []
    for name in ("config", "state"):
        lines += document_changes(one.documents[name], two.documents[name], name)
    for name in ("model", "optimizer"):
        lines += [f"{name}.{line}" for line in _array_diff(one.arrays[name], two.arrays[name])]
    shown = lines[:MAX_ROWS]
    return shown if len(lines) == len(shown) else [*shown, f"and {len(lines) - MAX_ROWS} more"]


def _array_diff(one: Mapping[str, ArrayBlob], two: Mapping[str, ArrayBlob]) -> Iterator[str]:
    for name in sorted(one.keys() | two.keys()):
        a, b = one.get(name), two.get(name)  # once: arrays of a checkpoint are read from disk on access
        if a is None or b is None:
            yield f"{name}: only in the {'second' if a is None else 'first'}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name}: {a.dtype} {list(a.shape)} -> {b.dtype} {list(b.shape)}"
        elif a.data != b.data:
            if (values := as_numbers(a)) is None or (others := as_numbers(b)) is None:
                yield f"{name}: different elements"
            else:
                yield f"{name}: largest difference {np.abs(values - others).max():.3g}"


def as_numbers(blob: ArrayBlob) -> npt.NDArray[Any] | None:
    """Return a blob's elements as a flat array in double precision; None: NumPy has no such type."""
    if blob.dtype == "bfloat16":
        # bfloat16 is the upper half of float32.
        halves = np.frombuffer(blob.data, dtype=np.uint16).astype(np.uint32) << 16
        return halves.view(np.float32).astype(np.float64)
    if blob.dtype.startswith("float8") or blob.dtype == "complex32":
        return None
    is_complex = blob.dtype.startswith("complex")
    return np.frombuffer(blob.data, dtype=blob.dtype).astype(np.complex128 if is_complex else np.float64)


FIELD = "train.initial_weights"


def open_weights(path: Path) -> StoredArrays:
    """Return the arrays of a safetensors file, or of all safetensors files in a folder.

    Transformers and ``horovod-train checkpoint export`` write such files, one or several in a folder. Files
    are mapped into memory, so a rank reads only its shard of a weight.

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
