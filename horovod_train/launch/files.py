"""Files that others read while they are written, and the folder for what outlives a run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def state_dir() -> Path:
    """Return the folder of this user in which things are remembered from run to run."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "horovod_train"


def write_whole(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file so that a reader sees the old one or the new one.

    Args:
        path: File to write; its folder is made.
        text: What is to stand in it.
        mode: Who may read and write it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(temporary).chmod(mode)
    Path(temporary).replace(path)
