"""Tracker that appends values of all runs of a job to a CSV file, one row per value (long format)."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from horovod_train.config.fields import Section
from horovod_train.config.support import TrackerSupport
from horovod_train.telemetry.tracking import SummaryValues, TrackedRun

COLUMNS = ("run", "step", "epochs", "name", "value")


class Arguments(Section):
    """Arguments of the CSV file, which has a row for each value of all runs of a job."""

    path: str | None = None
    """File, relative to the folder of the job's runs; null: ``metrics.csv``."""


SUPPORT = TrackerSupport(f"{__name__}:CsvFile", Arguments, default_place="metrics.csv")


class CsvFile:
    """Tracker that appends rows to a CSV file.

    Args:
        path: File, relative to the folder of the job's runs; None: ``metrics.csv``.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = Path(path or "metrics.csv")

    def start(self, run: TrackedRun) -> None:
        """Open the file, and terminate a last line that a full disk or a kill has truncated.

        Raises:
            OSError: The file cannot be read or written.
        """
        self._run_id = run.run_id
        path = run.folder / self._path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        last = b""
        if path.exists() and path.stat().st_size:
            with path.open("rb") as before:  # only the last byte, because the file may be large
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
        """Append a row for each value."""
        self._rows.writerows((self._run_id, step, epochs, name, value) for name, value in values.items())
        self._file.flush()

    def summarize(self, values: SummaryValues) -> None:
        """Append a row for each value of the summary, without a step."""
        self._rows.writerows(
            (self._run_id, "", "", f"summary/{name}", value) for name, value in values.items()
        )
        self._file.flush()

    def end(self) -> None:
        """Close the file."""
        self._file.close()
