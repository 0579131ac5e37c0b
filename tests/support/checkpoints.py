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
