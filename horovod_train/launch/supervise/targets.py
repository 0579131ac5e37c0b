"""Where a job's metrics are, for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from horovod_train.events.types import Target, Targets
from horovod_train.events.wire import Line
from horovod_train.files import write_whole
from horovod_train.launch.base import LaunchRequest

TARGETS_FILE = "prometheus-targets.json"


class TargetFiles:
    """Keeps the files that Prometheus reads while a run lasts; at its end nothing is left to scrape.

    Args:
        paths: The files.
        warn: Told of a file that cannot be written.
    """

    def __init__(self, paths: Sequence[Path], warn: Callable[[str], None]) -> None:
        self._paths = paths
        self._warn = warn
        self._targets: list[Target] = []

    def see(self, line: Line) -> None:
        """Add the targets that a line tells of."""
        if isinstance(line.event, Targets):
            self._targets += line.event.targets
            self._write(self._targets)

    def close(self) -> None:
        """Tell Prometheus that there is nothing left."""
        if self._targets:
            self._write([])

    def _write(self, targets: Sequence[Target]) -> None:
        for path in self._paths:
            try:
                write_targets(path, targets)
            except OSError as error:
                self._warn(f"warning: {path} was not written for Prometheus: {error.strerror}")


def target_paths(request: LaunchRequest) -> list[Path]:
    """Return the files of a job: one in its folder, and one in the folder that it names."""
    paths = [request.run_dir / TARGETS_FILE]
    if (shared := request.job.metrics.targets_dir) is not None:
        paths.append(Path(shared) / f"{request.job.name}.json")
    return paths


def write_targets(path: Path, targets: Iterable[Target]) -> None:
    """Write a file for Prometheus' ``file_sd_configs``, whole or not at all.

    Args:
        path: File to write; Prometheus reads it again whenever it changes.
        targets: Where each rank serves its metrics.
    """
    document = [{"targets": [target.address], "labels": dict(target.labels)} for target in targets]
    # Prometheus usually runs as another user.
    write_whole(path, json.dumps(document, indent=2) + "\n", mode=0o644)
