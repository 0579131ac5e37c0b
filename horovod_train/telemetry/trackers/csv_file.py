"""A CSV file that all runs of a job add to: one row per value, ready for a pivot table."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from horovod_train.telemetry.trackers.base import TrackedRun

COLUMNS = ("run", "step", "epochs", "name", "value")


class CsvFile:
    """Adds rows to a file, and never changes those that are there.

    Args:
        path: The file; None: ``metrics.csv`` next to the runs of the job. A relative one begins there, too.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = Path(path or "metrics.csv")

    def start(self, run: TrackedRun) -> None:
        """Open the file; a line that was cut off, by a full disk or a kill, stays its own line."""
        self._run_id = run.run_id
        path = run.folder / self._path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        last = b""
        if path.exists() and path.stat().st_size:
            with path.open("rb") as before:  # the last byte alone: the file may have grown for months
                before.seek(-1, os.SEEK_END)
                last = before.read()
        self._file = path.open("a", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file)
        if not last:
            self._rows.writerow(COLUMNS)
        elif last != b"\n":
            self._file.write("\r\n")
        self._file.flush()

    def log(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Add a row for each value."""
        self._rows.writerows((self._run_id, step, epochs, name, value) for name, value in values.items())
        self._file.flush()

    def end(self) -> None:
        """Close the file."""
        self._file.close()
