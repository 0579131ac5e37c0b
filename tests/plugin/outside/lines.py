"""A tracker."""

from __future__ import annotations

from collections.abc import Mapping

from horovod_train.telemetry.tracking import TrackedRun


class Lines:
    """Appends a line for each value to a file."""

    def __init__(self, path: str = "lines.txt", digits: int = 6) -> None:
        self._path, self._digits = path, digits

    def start(self, run: TrackedRun) -> None:
        """Open the file."""
        self._file = (run.folder / self._path).open("a")

    def log(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Write a line for each value."""
        del epochs
        self._file.writelines(f"{step} {name} {value:.{self._digits}g}\n" for name, value in values.items())
        self._file.flush()

    def end(self) -> None:
        """Close the file."""
        self._file.close()
