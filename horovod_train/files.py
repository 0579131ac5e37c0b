"""Files that others read while they are written, and folders: of a run, and for what outlives it."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

Access = Literal["private", "group", "everyone"]
MODES: dict[Access, int] = {"private": 0o700, "group": 0o750, "everyone": 0o755}


def state_dir() -> Path:
    """Return the folder of this user in which things are remembered from run to run."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "horovod_train"


def make_folder(path: Path, access: Access) -> None:
    """Make a folder, and those above it that are missing.

    Args:
        path: The folder; one that is there already stays as it is.
        access: Who may look into it, and so at everything below.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(MODES[access])  # whatever the umask


def write_whole(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file so that a reader sees the old one or the new one.

    Args:
        path: File to write; its folder is made.
        text: What is to stand in it.
        mode: Who may read and write it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except OSError:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
