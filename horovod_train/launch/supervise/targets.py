"""Where a job's metrics are, for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from horovod_train.files import write_whole


def write_targets(path: Path, targets: Iterable[tuple[str, Mapping[str, str]]]) -> None:
    """Write a file for Prometheus' ``file_sd_configs``, whole or not at all.

    Args:
        path: File to write; Prometheus reads it again whenever it changes.
        targets: Address and labels of each rank.
    """
    document = [{"targets": [address], "labels": dict(labels)} for address, labels in targets]
    # Prometheus usually runs as another user.
    write_whole(path, json.dumps(document, indent=2) + "\n", mode=0o644)
