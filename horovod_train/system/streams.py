"""Standard output and error that never end a job: what cannot be shown is dropped.

A terminal is closed, a pipe is cut, the disk behind ``> log`` is full, the user has pressed Ctrl-S:
training neither stops nor waits for long.
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
"""So long a reader that does not read is waited for, in seconds; then nothing is, until it reads again."""

TERMINAL_BYTES = 256

MAX_LINES_AT_ONCE = 80
"""So many lines of each stream may lie in a pipe that mpirun reads. Open MPI 4 reads up to 4096 bytes, puts a
tag of up to 24 bytes before each line, and drops in silence what is then beyond 8192 bytes."""

PIPE_POLL_S = 0.0005


class DroppingStream(io.RawIOBase):
    """Writes to a file descriptor; never raises, and never waits for long.

    Args:
        handle: The descriptor.
        patience_s: How long to wait for a pipe or terminal whose reader does not read, in seconds.
    """

    def __init__(self, handle: int, patience_s: float = PATIENCE_S) -> None:
        super().__init__()
        self._handle = handle
        self._patience_s = patience_s
        self._is_reader_behind = False
        self._is_read_by_mpirun = "OMPI_COMM_WORLD_RANK" in os.environ and _is_pipe(handle)
        self._is_mpirun_behind = False
        self._num_lines_unread = 0
        self.num_dropped_bytes = 0
        """Since something was last shown."""

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
        """Write what can be written; drop the rest. Returns the length of all of it."""
        view = memoryview(data).cast("B")
        if self.num_dropped_bytes and self._is_ready():
            note = f"\n... {self.num_dropped_bytes} bytes could not be shown ...\n".encode()
            if self._write_all(memoryview(note)) == len(note):
                self.num_dropped_bytes = 0
        self.num_dropped_bytes += len(view) - self._write_all(view)
        return len(view)

    def _write_all(self, view: memoryview) -> int:
        """Return how many bytes were written."""
        done = 0
        try:
            while done < len(view) and self._is_ready():
                # What is ready takes at least so much without blocking.
                size = TERMINAL_BYTES if self.isatty() else select.PIPE_BUF
                piece = view[done : done + size]
                if self._is_read_by_mpirun and not (piece := self._few_lines(piece)):
                    break
                done += os.write(self._handle, piece)
        except OSError:
            pass
        return done

    def _few_lines(self, piece: memoryview) -> memoryview:
        """Return the beginning of a piece with as many lines as mpirun can tag; wait once until it can.

        Nothing is returned if mpirun does not read.
        """
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
        """Wait until the reader takes something; with patience the first time, without after that."""
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
        return True  # closed: writing says so


def leave_terminal_of_mpirun() -> None:
    """Redirect standard output to standard error's pipe, if mpirun has made standard output a terminal.

    For a rank whose launcher reads both streams as one. A process can read how many bytes of a pipe are
    unread, but not of a terminal; ``MAX_LINES_AT_ONCE`` needs that number.
    """
    with suppress(OSError, ValueError, AttributeError):
        if "OMPI_COMM_WORLD_RANK" in os.environ and os.isatty(1) and _is_pipe(2):
            sys.stdout.flush()
            os.dup2(2, 1)


def num_dropped_bytes() -> int:
    """Return how many of the last bytes of standard output and error could not be shown."""
    num_bytes = 0
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
            if isinstance(raw := getattr(stream.buffer, "raw", None), DroppingStream):
                num_bytes += raw.num_dropped_bytes
    return num_bytes


def ignore_unencodable_output() -> None:
    """Let this process's standard output and error never raise, at its end neither."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        try:
            handle = stream.fileno() if stream is not None else number
        except (OSError, ValueError):
            continue  # a test's, or a notebook's: it is not a descriptor
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
