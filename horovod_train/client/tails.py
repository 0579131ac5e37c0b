"""Incremental readers of a job's events and output.

Each line has a position, a text from which another reader continues after this line, in any process.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from zlib import crc32

from horovod_train.events.wire import parse_line
from horovod_train.launch.base import Launcher, Submitted
from horovod_train.system.files import open_regular

CHUNK_BYTES = 256 * 1024
MAX_LINE_BYTES = 16 * 2**20


class Tail(Protocol):
    """Reader of lines.

    Attributes:
        pause_s: Time to wait after a call of ``read`` that has returned no line.
    """

    pause_s: float

    def read(self, *, is_complete: bool = False) -> list[tuple[str, str]]:
        """Return new lines as (position after the line, line); empty: there are none at present.

        Args:
            is_complete: The writer has ended: an unfinished last line is returned, too.

        Raises:
            LaunchError: The output cannot be read from the system of the launcher.
        """
        ...


@dataclass
class _Place:
    """Place after a line of a file: inode, offset, and size, checksum and time of the line."""

    inode: int = 0
    offset: int = 0
    size_bytes: int = 0
    checksum: int = 0
    time_unix_s: float = float("-inf")

    @classmethod
    def of(cls, position: str) -> _Place:
        """Parse a position; an invalid one is the start of the file."""
        numbers = position.split("-", 4)
        try:
            inode, offset, size_bytes, checksum = (int(number) for number in numbers[:4])
            time_unix_s = float(numbers[4])
        except (ValueError, IndexError):
            return cls()
        return cls(inode, max(0, offset), max(0, size_bytes), checksum, time_unix_s)

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}-{self.size_bytes}-{self.checksum}-{self.time_unix_s!r}"

    def is_in(self, file: BinaryIO) -> bool:
        """Return whether a file has the line at its place; inodes of deleted files are used again."""
        if os.fstat(file.fileno()).st_ino != self.inode or self.size_bytes > self.offset:
            return False
        file.seek(self.offset - self.size_bytes)
        return crc32(file.read(self.size_bytes)) == self.checksum


class FileTail:
    """Reader of a file to which lines are appended, and which may be missing or replaced.

    Args:
        path: The file.
        position: Position after the last line that was read; empty or invalid: start of the file.
        has_times: Lines are JSON objects with ``time_unix_s``. After the file was replaced by one with fewer
            lines (``events/file.py``), reading continues after the last line that was read, or, if this line
            was removed, with the first later time.
    """

    pause_s = 1.0

    def __init__(self, path: Path, position: str = "", *, has_times: bool = False) -> None:
        self._path = path
        self._has_times = has_times
        self._last = _Place.of(position)

    def read(self, *, is_complete: bool = False) -> list[tuple[str, str]]:
        """Return new lines, at most about ``CHUNK_BYTES`` at once."""
        try:
            with open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                if not self._last.is_in(file):
                    self._last.inode, self._last.offset = found.st_ino, self._offset_in(file)
                    self._last.size_bytes = self._last.checksum = 0
                file.seek(self._last.offset)
                data = file.read(CHUNK_BYTES)
                while data and b"\n" not in data and len(data) < min(MAX_LINE_BYTES, found.st_size):
                    more = file.read(CHUNK_BYTES)
                    if not more:
                        break
                    data += more
        except FileNotFoundError:  # not written yet
            return []
        is_end = self._last.offset + len(data) >= found.st_size
        return self._lines(data, is_complete=is_complete and is_end)

    def _offset_in(self, file: BinaryIO) -> int:
        """Return the offset in a file that has replaced the one that was read."""
        if not self._has_times or self._last.time_unix_s == float("-inf"):
            return 0
        file.seek(0)
        offset = after = 0
        for line in file:
            offset += len(line)
            if len(line) == self._last.size_bytes and crc32(line) == self._last.checksum:
                return offset
            time_unix_s = _time_of(line.decode(errors="replace"))
            if time_unix_s is not None and time_unix_s <= self._last.time_unix_s:
                after = offset
        return after

    def _lines(self, data: bytes, *, is_complete: bool) -> list[tuple[str, str]]:
        lines = []
        *whole, rest = data.split(b"\n")
        parts = [line + b"\n" for line in whole]
        if rest and (is_complete or len(data) >= MAX_LINE_BYTES):
            parts.append(rest)
        for part in parts:
            text = part.decode(errors="replace").removesuffix("\n").rstrip("\r")
            place = self._last
            place.offset, place.size_bytes, place.checksum = place.offset + len(part), len(part), crc32(part)
            if self._has_times:
                time_unix_s = _time_of(text)
                if time_unix_s is None:
                    continue
                place.time_unix_s = time_unix_s
            lines.append((str(place), text))
        return lines


def _time_of(line: str) -> float | None:
    """Return the time of an event; None: the line is not an event."""
    try:
        return float(json.loads(line)["time_unix_s"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class OutputTail:
    """Reader of a job's output through its launcher. A position is the number of lines read.

    Args:
        launcher: Launcher of the job.
        job: The job.
        position: Position after the last line that was read.
        as_events: Return only events, as lines of ``events.jsonl`` with the time of the submission.
    """

    pause_s = 5.0  # each read requests the whole output

    def __init__(
        self, launcher: Launcher, job: Submitted, position: str = "", *, as_events: bool = False
    ) -> None:
        self._launcher, self._job = launcher, job
        self._num_read = int(position) if position.isdecimal() else 0
        self._as_events = as_events

    def read(self, *, is_complete: bool = False) -> list[tuple[str, str]]:
        """Return new lines."""
        del is_complete  # the launcher returns unfinished lines
        lines = []
        found = list(self._launcher.logs(self._job, follow=False))
        if len(found) < self._num_read:  # the log was rotated
            self._num_read = 0
        for line in found[self._num_read :]:
            self._num_read += 1
            parsed = parse_line(line)
            if not self._as_events:
                lines.append((str(self._num_read), line))
            elif parsed.event is not None:
                fields = {"time_unix_s": self._job.submitted_unix_s, "rank": parsed.rank}
                document = {**fields, "kind": parsed.event.kind, **parsed.event.model_dump()}
                lines.append((str(self._num_read), json.dumps(document)))
        return lines
