"""Atomic writes, log files that never raise, and folders with access modes."""

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
# Errors of file systems without hard links.
NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
MAX_DOCUMENT_BYTES = 16 * 2**20
"""Largest size of a file that is read as a whole, unless a reader states another one."""
MODES: dict[Access, int] = {"private": 0o700, "group": 0o750, "everyone": 0o755}


def state_dir() -> Path:
    """Return this user's folder for state that is retained between runs."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "horovod_train"


def make_folder(path: Path, access: Access) -> None:
    """Create a folder and its missing parents; an existing folder is not changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(MODES[access])  # independent of the umask


def write_atomic(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file atomically, so that readers see the old or the new content; create its folder."""
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


def create_atomic(path: Path, text: str, mode: int = 0o600) -> bool:
    """Create a file with its content, unless it exists; return whether it was created.

    Of several processes that call this at the same time, one creates the file.

    Raises:
        OSError: The file cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(mode)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                file.write(text)
                return True
            return False
    finally:
        Path(temporary).unlink()
    return True


def open_regular(path: Path) -> BinaryIO:
    """Open a file of any user for reading, without blocking on pipes and without following links.

    Raises:
        OSError: The file is missing, is not readable, or is not a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the content of a file of any user, as ``open_regular`` opens it.

    Raises:
        OSError: The file cannot be opened, or has more than ``max_bytes``.
    """
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return data


class LogFile:
    """Log file. If the disk is full or has failed, lines are lost, and the job continues.

    Args:
        path: The file.
        on_loss: Called with a description of the problem when a line is lost.
        describe_loss: Function that returns the text that replaces a number of lost lines.
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
        """Append a line; thread-safe."""
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
        """Close the file."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                os.close(handle)
            except OSError as error:  # NFS may report a failed write only at close
                self._on_loss(f"{self.path.name} may be incomplete: {error.strerror}")

    def _put(self, line: str) -> None:
        if self._handle is None:
            self._handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Not buffered, because buffered lines would be lost if the process is killed.
        data = ("" if self._at_line_start else "\n").encode() + line.encode(errors="replace") + b"\n"
        while data:
            data = data[os.write(self._handle, data) :]
            self._at_line_start = not data
