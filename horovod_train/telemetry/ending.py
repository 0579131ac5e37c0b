"""Export of a rank's last metrics, because a job may be shorter than the time between two scrapes."""

from __future__ import annotations

import logging
from pathlib import Path

from prometheus_client import CollectorRegistry, push_to_gateway, write_to_textfile

from horovod_train.errors import result_of

log = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 5.0


def write_last_metrics(registry: CollectorRegistry, path: Path) -> None:
    """Write current metrics atomically, for users and node_exporter. Errors are logged, not raised."""

    def write() -> None:
        write_to_textfile(str(path), registry)
        path.chmod(0o644)  # node_exporter usually runs as another user

    _, error = result_of(write)
    if error is not None:
        log.warning("the last metrics were not written to %s: %s", path, error)


def push_last_metrics(registry: CollectorRegistry, url: str, training_job: str, rank: int) -> None:
    """Push current metrics to a Pushgateway. Errors are logged, not raised."""
    _, error = result_of(
        lambda: push_to_gateway(
            url,
            job="horovod_train",
            grouping_key={"training_job": training_job, "rank": str(rank)},
            registry=registry,
            timeout=PUSH_TIMEOUT_S,
        )
    )
    if error is not None:
        log.warning("the last metrics were not pushed to %s: %s", url, error)
