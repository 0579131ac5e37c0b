"""Logs of a run: a disk that is full, or gone, costs lines and never the job."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock


class LogFile:
    """A file to which lines are added.

    Args:
        path: The file.
        on_loss: Told what is wrong when a line is lost.
    """

    def __init__(self, path: Path, on_loss: Callable[[str], None] = lambda _: None) -> None:
        self.path = path
        self._on_loss = on_loss
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
                    self._put(f"... {self._num_lost} lines could not be written ...")
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
