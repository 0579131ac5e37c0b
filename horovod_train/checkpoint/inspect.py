"""Look at checkpoints and compare them, without any framework."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import localtime, strftime

import numpy as np
import numpy.typing as npt

from horovod_train.checkpoint.arrays import ArrayBlob, write_plain
from horovod_train.checkpoint.changes import document_changes
from horovod_train.checkpoint.schema import StateDocument, checked
from horovod_train.checkpoint.store import (
    StoredCheckpoint,
    list_checkpoints,
    list_damaged,
    read_checkpoint,
    read_manifest,
    verify,
)
from horovod_train.checkpoint.stored_arrays import StoredArrays
from horovod_train.errors import CheckpointError

MAX_ROWS = 40


def checkpoints_in(path: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints of a folder of checkpoints or of a run, newest first."""
    return list_checkpoints(path) or list_checkpoints(path / "checkpoints")


def discard_damaged(path: Path) -> list[Path]:
    """Delete what is damaged in a folder of checkpoints or of a run; return what was deleted."""
    damaged = [checkpoint.path for checkpoint in checkpoints_in(path) if verify(checkpoint.path)]
    damaged += [*list_damaged(path), *list_damaged(path / "checkpoints")]
    for folder in damaged:
        shutil.rmtree(folder)
    return damaged


def describe_row(checkpoint: StoredCheckpoint) -> str:
    """Return one line of a list."""
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
    """Return everything about a checkpoint but its numbers.

    Raises:
        CheckpointError: It is damaged.
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


def export(path: Path, file: Path, *, averaged: bool | None = None) -> tuple[StoredCheckpoint, int]:
    """Write the weights and buffers of the newest valid checkpoint to one safetensors file.

    Names are those of the model, whatever strategy has trained it. One array is in memory at a time.

    Args:
        path: A folder of checkpoints or of a run, or one checkpoint.
        file: Must not be there yet.
        averaged: Averaged weights (``ema``, or those that an optimizer evaluates), and not those that are
            trained; None: those that the optimizer evaluates, if it has such.

    Returns:
        The checkpoint, and the size of the file in bytes.

    Raises:
        CheckpointError: No valid checkpoint, or the file cannot be written.
    """
    candidates = checkpoints_in(path) or [StoredCheckpoint(path, 0)]
    found = next((each for each in candidates if not verify(each.path)), None)
    if found is None:
        raise CheckpointError(
            f"{path} has no valid checkpoint", hint="name the folder of a run, such as runs/<name>"
        )
    model = _weights_of(found.path, averaged=averaged)
    temporary = file.with_name(f".{file.name}-{os.getpid()}")
    try:
        if file.exists():
            raise CheckpointError(f"{file} is there already", hint="give another name, or remove it")
        size_bytes = write_plain(temporary, model, {name: model.kind(name) for name in model})
        temporary.rename(file)
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return found, size_bytes


def _weights_of(path: Path, *, averaged: bool | None) -> StoredArrays:
    """Return weights and buffers of a checkpoint, by their names in the model.

    Raises:
        CheckpointError: It has no averaged weights, and they are wanted.
    """
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
        return model
    prefix = "averaged.weights."
    return model.replaced(
        {n.removeprefix(prefix): optimizer.pieces(n) for n in optimizer if n.startswith(prefix)}
    )


def differences(first: Path, second: Path) -> list[str]:
    """Return a line for each thing in which two checkpoints differ; generators are not compared.

    Raises:
        CheckpointError: One of them is damaged.
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
        if name not in one or name not in two:
            yield f"{name}: only in the {'second' if name not in one else 'first'}"
        elif (one[name].dtype, one[name].shape) != (two[name].dtype, two[name].shape):
            a, b = one[name], two[name]
            yield f"{name}: {a.dtype} {list(a.shape)} -> {b.dtype} {list(b.shape)}"
        elif one[name].data != two[name].data:
            a_values, b_values = as_float64(one[name]), as_float64(two[name])
            yield f"{name}: largest difference {np.abs(a_values - b_values).max():.3g}"


def as_float64(blob: ArrayBlob) -> npt.NDArray[np.float64]:
    """Return a blob's elements in double precision, flat."""
    if blob.dtype == "bfloat16":
        # bfloat16 is the upper half of float32.
        halves = np.frombuffer(blob.data, dtype=np.uint16).astype(np.uint32) << 16
        return halves.view(np.float32).astype(np.float64)
    if blob.dtype.startswith("float8") or blob.dtype.startswith("complex"):
        return np.frombuffer(blob.data, dtype=np.uint8).astype(np.float64)
    return np.frombuffer(blob.data, dtype=blob.dtype).astype(np.float64)
