"""Targets for Prometheus' HTTP service discovery."""

from __future__ import annotations

from collections.abc import Iterable

from horovod_train.events.targets import as_document
from horovod_train.monitor.runs import Run


def http_sd(runs: Iterable[Run]) -> list[dict[str, object]]:
    """Return the targets of unfinished runs, in the format of ``http_sd_configs``."""
    return as_document(
        target
        for run in runs
        if not run.status().has_ended
        for _, target in sorted(run.history().targets.items())
    )
