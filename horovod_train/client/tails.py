"""Incremental readers of a job's events and output.

Each line has a position, a text from which another reader continues after this line, in any process.
"""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Protocol

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


class FileTail:
    """Reader of a file to which lines are appended, and which may be missing or replaced.

    Args:
        path: The file.
        position: Position after the last line that was read; empty or invalid: start of the file.
        has_times: Lines are JSON objects with ``time_unix_s``. After the file was replaced by one with fewer
            lines (``events/file.py``), reading continues with the first event
            later than the last one that was read.
    """

    pause_s = 1.0

    def __init__(self, path: Path, position: str = "", *, has_times: bool = False) -> None:
        self._path = path
        self._has_times = has_times
        self._inode = self._offset = 0
        self._time_unix_s = self._skip_until_unix_s = float("-inf")
        numbers = position.split("-", 2)
        try:
            self._inode, self._offset = int(numbers[0]), max(0, int(numbers[1]))
            self._time_unix_s = float(numbers[2]) if has_times else self._time_unix_s
        except (ValueError, IndexError):
            self._inode = self._offset = 0

    def read(self, *, is_complete: bool = False) -> list[tuple[str, str]]:
        """Return new lines, at most about ``CHUNK_BYTES`` at once."""
        try:
            with open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                    self._skip_until_unix_s = self._time_unix_s
                file.seek(self._offset)
                data = file.read(CHUNK_BYTES)
                while data and b"\n" not in data and len(data) < min(MAX_LINE_BYTES, found.st_size):
                    more = file.read(CHUNK_BYTES)
                    if not more:
                        break
                    data += more
        except OSError:  # not written yet
            return []
        return self._lines(data, is_complete=is_complete and self._offset + len(data) >= found.st_size)

    def _lines(self, data: bytes, *, is_complete: bool) -> list[tuple[str, str]]:
        lines = []
        *whole, rest = data.split(b"\n")
        sizes_bytes = [len(line) + 1 for line in whole]
        if rest and (is_complete or len(data) >= MAX_LINE_BYTES):
            whole.append(rest)
            sizes_bytes.append(len(rest))
        for line, size_bytes in zip(whole, sizes_bytes, strict=True):
            self._offset += size_bytes
            text = line.decode(errors="replace").rstrip("\r")
            if self._has_times:
                time_unix_s = _time_of(text)
                if time_unix_s is None or time_unix_s <= self._skip_until_unix_s:
                    continue
                self._time_unix_s, self._skip_until_unix_s = time_unix_s, float("-inf")
            lines.append((f"{self._inode}-{self._offset}-{self._time_unix_s!r}", text))
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
        for line in islice(self._launcher.logs(self._job, follow=False), self._num_read, None):
            self._num_read += 1
            parsed = parse_line(line)
            if not self._as_events:
                lines.append((str(self._num_read), line))
            elif parsed.event is not None:
                fields = {"time_unix_s": self._job.submitted_unix_s, "rank": parsed.rank}
                document = {**fields, "kind": parsed.event.kind, **parsed.event.model_dump()}
                lines.append((str(self._num_read), json.dumps(document)))
        return lines
