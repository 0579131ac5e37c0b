"""Checkpoints that a test makes without a manager."""

from __future__ import annotations

from pathlib import Path

from horovod_train.checkpoint import store
from horovod_train.checkpoint.writing import Content, Writing, begin, temporary_name


def write_checkpoint(directory: Path, step: int, content: Content) -> store.Manifest:
    """Write a checkpoint, as the only rank that does."""
    folder = directory / temporary_name(step)
    begin(folder)
    return Writing(step, folder, [0]).complete(content)


def newest(folder: Path, name: str) -> Path:
    """The newest checkpoint of a job whose ``run_dir`` is ``folder/runs``."""
    return store.list_checkpoints(folder / "runs" / name / "checkpoints")[0].path


def arrays(path: Path) -> dict[str, bytes]:
    """The weights and the optimizer's state of a checkpoint, as bytes by name."""
    content = store.read_checkpoint(path)
    return {
        f"{part}.{name}": bytes(blob.data)
        for part in ("model", "optimizer")
        for name, blob in content.arrays[part].items()
    }
