"""Files that others read while they are written, logs that cost lines and never the job, and folders."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Literal

Access = Literal["private", "group", "everyone"]
MODES: dict[Access, int] = {"private": 0o700, "group": 0o750, "everyone": 0o755}


def state_dir() -> Path:
    """Return the folder of this user in which things are remembered from run to run."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "horovod_train"


def make_folder(path: Path, access: Access) -> None:
    """Make a folder, and those above it that are missing.

    Args:
        path: The folder; one that is there already stays unchanged.
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


def open_regular(path: Path) -> BinaryIO:
    """Open a file of any user for reading, without blocking on pipes and without following links.

    Raises:
        OSError: It is not there, may not be read, or is something else.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


class LogFile:
    """A file to which lines are added. A disk that is full, or gone, costs lines and never the job.

    Args:
        path: The file.
        on_loss: Told what is wrong when a line is lost.
        describe_loss: Returns the text that replaces this many lines.
    """

    def __init__(
        self,
        path: Path,
        on_loss: Callable[[str], None] = lambda _: None,
        describe_loss: Callable[[int], str] = "... {} lines could not be written ...".format,
    ) -> None:
        self.path = path
        self._on_loss = on_loss
        self._describe_loss = describe_loss
        self._handle: int | None = None
        self._num_lost = 0
        self._at_line_start = True
        self._lock = Lock()

    def write(self, line: str) -> None:
        """Add a line; from any thread."""
        problem = ""
        with self._lock:
            try:
                if self._num_lost:
                    self._put(self._describe_loss(self._num_lost))
                    self._num_lost = 0
                self._put(line)
            except OSError as error:
                self._num_lost += 1
                problem = f"{self.path.name} is incomplete: {error.strerror}"
        if problem:
            self._on_loss(problem)

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                os.close(handle)
            except OSError as error:  # NFS says it only now
                self._on_loss(f"{self.path.name} may be incomplete: {error.strerror}")

    def _put(self, line: str) -> None:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Written at once, not collected: what is collected would be missing after a kill.
        data = ("" if self._at_line_start else "\n").encode() + line.encode(errors="replace") + b"\n"
        while data:
            data = data[os.write(self._handle, data) :]
            self._at_line_start = not data
