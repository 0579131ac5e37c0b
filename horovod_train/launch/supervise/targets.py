"""Files with the metrics endpoints of a job, for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from horovod_train.events.targets import as_document, parse_targets
from horovod_train.events.types import Target, Targets
from horovod_train.events.wire import Line
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.supervise.follow import Follower
from horovod_train.system.files import read_regular, write_atomic

TARGETS_FILE = "prometheus-targets.json"


class TargetFiles(Follower):
    """Follower that writes the target files for Prometheus, and removes the run's targets at the end.

    The files may also contain targets of other runs of the job.
    """

    def __init__(self, paths: Sequence[Path], run_id: str, warn: Callable[[str], None]) -> None:
        self._paths = paths
        self._run_id = run_id
        self._warn = warn
        self._targets: list[Target] = []

    def handle(self, line: Line) -> None:
        """Add the targets of a line, and write the files."""
        if isinstance(line.event, Targets):
            self._targets += line.event.targets
            self._write(self._targets)

    def close(self) -> None:
        """Remove the targets of the run from the files."""
        if self._targets:
            self._write([])

    def _write(self, targets: Sequence[Target]) -> None:
        for path in self._paths:
            try:
                write_targets(path, [*self._of_others(path, targets), *targets])
            except OSError as error:
                self._warn(f"warning: {path} was not written for Prometheus: {error.strerror}")

    def _of_others(self, path: Path, targets: Sequence[Target]) -> list[Target]:
        """Return the targets of other runs, except ended ones, whose addresses this run uses now."""
        ours = {target.address for target in targets}
        return [
            other
            for other in read_targets(path)
            if other.labels.get("run", self._run_id) != self._run_id and other.address not in ours
        ]


def read_targets(path: Path) -> list[Target]:
    """Return the targets in a file; empty, if it cannot be read."""
    try:
        return parse_targets(read_regular(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def target_paths(request: LaunchRequest) -> list[Path]:
    """Return the target files of a job: one in its folder, and one in ``metrics.targets_dir`` if set."""
    paths = [request.run_dir / TARGETS_FILE]
    if (shared := request.job.metrics.targets_dir) is not None:
        paths.append(Path(shared) / f"{request.job.name}.json")
    return paths


def write_targets(path: Path, targets: Iterable[Target]) -> None:
    """Write a file for ``file_sd_configs`` of Prometheus atomically; Prometheus reads changed files again."""
    # Prometheus usually runs as another user.
    write_atomic(path, json.dumps(as_document(targets), indent=2) + "\n", mode=0o644)
