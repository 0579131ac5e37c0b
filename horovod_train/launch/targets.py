"""Where a job's metrics are, for Prometheus."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_targets(path: Path, targets: Iterable[tuple[str, Mapping[str, str]]]) -> None:
    """Write a file for Prometheus' ``file_sd_configs``, whole or not at all.

    Args:
        path: File to write; Prometheus reads it again whenever it changes.
        targets: Address and labels of each rank.
    """
    document = [{"targets": [address], "labels": dict(labels)} for address, labels in targets]
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=2)
        file.write("\n")
    # mkstemp makes files for one user; Prometheus usually runs as another.
    Path(temporary).chmod(0o644)
    Path(temporary).replace(path)
