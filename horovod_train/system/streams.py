"""Standard output and error that drop output instead of raising errors or blocking for long.

Training continues if the terminal or pipe is closed, the disk is full, or the user presses Ctrl-S.
"""

from __future__ import annotations

import fcntl
import io
import os
import select
import stat
import sys
import termios
from contextlib import suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PATIENCE_S = 5.0
"""Time to wait for a blocked reader, in seconds; afterwards output is dropped until it reads again."""

TERMINAL_BYTES = 256

MAX_LINES_AT_ONCE = 80
"""Maximum number of unread lines in a pipe to mpirun. Open MPI 4 reads up to 4096 bytes, puts a tag of up to
24 bytes before each line, and drops without a message any data beyond 8192 bytes."""

PIPE_POLL_S = 0.0005


class DroppingStream(io.RawIOBase):
    """Stream to a file descriptor that never raises, and blocks at most ``patience_s`` seconds per stall."""

    def __init__(self, handle: int, patience_s: float = PATIENCE_S) -> None:
        super().__init__()
        self._handle = handle
        self._patience_s = patience_s
        self._is_reader_behind = False
        self._is_read_by_mpirun = "OMPI_COMM_WORLD_RANK" in os.environ and _is_pipe(handle)
        self._is_mpirun_behind = False
        self._num_lines_unread = 0
        self.num_dropped_bytes = 0
        """Number of bytes that were dropped since the last successful write."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._handle

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        try:
            return os.isatty(self._handle)
        except OSError:
            return False

    def write(self, data: ReadableBuffer, /) -> int:
        """Write as much as possible, and drop the rest; return the length of ``data``."""
        view = memoryview(data).cast("B")
        if self.num_dropped_bytes and self._is_ready():
            note = f"\n... {self.num_dropped_bytes} bytes could not be shown ...\n".encode()
            if self._write_all(memoryview(note)) == len(note):
                self.num_dropped_bytes = 0
        self.num_dropped_bytes += len(view) - self._write_all(view)
        return len(view)

    def _write_all(self, view: memoryview) -> int:
        """Write as much as possible; return the number of written bytes."""
        done = 0
        try:
            while done < len(view) and self._is_ready():
                # A descriptor that is ready accepts at least this size without blocking.
                size = TERMINAL_BYTES if self.isatty() else select.PIPE_BUF
                piece = view[done : done + size]
                if self._is_read_by_mpirun and not (piece := self._few_lines(piece)):
                    break
                done += os.write(self._handle, piece)
        except OSError:
            pass
        return done

    def _few_lines(self, piece: memoryview) -> memoryview:
        """Return the part of a chunk whose lines mpirun can tag; empty if mpirun does not read."""
        found = bytes(piece)
        deadline_s = monotonic() + (0.0 if self._is_mpirun_behind else self._patience_s)
        num_lines = min(found.count(b"\n"), MAX_LINES_AT_ONCE)
        while self._num_lines_unread + num_lines > MAX_LINES_AT_ONCE:
            if _num_unread_bytes(self._handle) == 0:
                self._num_lines_unread = 0
            elif monotonic() >= deadline_s:
                self._is_mpirun_behind = True
                return piece[:0]
            else:
                sleep(PIPE_POLL_S)
        self._is_mpirun_behind = False
        self._num_lines_unread += num_lines
        if num_lines < MAX_LINES_AT_ONCE:
            return piece
        end = -1
        for _ in range(num_lines):
            end = found.index(b"\n", end + 1)
        return piece[: end + 1]

    def _is_ready(self) -> bool:
        """Wait for the reader, and return whether it reads; after a timeout, later calls do not wait."""
        if _is_file(self._handle):
            return True
        poller = select.poll()
        poller.register(self._handle, select.POLLOUT)
        is_ready = bool(poller.poll(0.0 if self._is_reader_behind else self._patience_s * 1000))
        self._is_reader_behind = not is_ready
        return is_ready


def _is_pipe(handle: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(handle).st_mode)
    except OSError:
        return False


def _num_unread_bytes(handle: int) -> int:
    """Return the number of unread bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(handle, termios.FIONREAD, bytes(4)), sys.byteorder)


def _is_file(handle: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(handle).st_mode)
    except OSError:
        return True  # the descriptor is closed: the write raises an error


def leave_terminal_of_mpirun() -> None:
    """Redirect standard output to standard error's pipe, if mpirun has made standard output a terminal.

    ``MAX_LINES_AT_ONCE`` requires the number of unread bytes, which is available for a pipe but not for a
    terminal. Only for ranks whose launcher reads both streams as one.
    """
    with suppress(OSError, ValueError, AttributeError):
        if "OMPI_COMM_WORLD_RANK" in os.environ and os.isatty(1) and _is_pipe(2):
            sys.stdout.flush()
            os.dup2(2, 1)


def num_dropped_bytes() -> int:
    """Return the number of bytes that standard output and error have dropped since their last output."""
    num_bytes = 0
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
            if isinstance(raw := getattr(stream.buffer, "raw", None), DroppingStream):
                num_bytes += raw.num_dropped_bytes
    return num_bytes


def install_dropping_streams() -> None:
    """Replace standard output and error by streams that never raise, even at the end of the process."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        try:
            handle = stream.fileno() if stream is not None else number
        except (OSError, ValueError):
            continue  # a stream of a test or notebook has no descriptor
        with suppress(AttributeError, OSError):
            stream.flush()
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                io.BufferedWriter(DroppingStream(handle)),
                encoding=getattr(stream, "encoding", None) or "utf-8",
                errors="backslashreplace",
                line_buffering=True,
            ),
        )
