"""What is left of a rank's metrics when it ends: a job may be shorter than the time between two scrapes."""

from __future__ import annotations

import logging
from pathlib import Path

from prometheus_client import CollectorRegistry, push_to_gateway, write_to_textfile

log = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 5.0


def write_last_metrics(registry: CollectorRegistry, path: Path) -> None:
    """Write current metrics atomically, for users and for node_exporter.

    A missing folder or a full disk is reported, and is not an error.
    """
    try:
        write_to_textfile(str(path), registry)
        path.chmod(0o644)  # node_exporter usually runs as another user
    except Exception as error:  # noqa: BLE001  (training has ended well, whatever becomes of its metrics)
        log.warning("the last metrics were not written to %s: %s", path, error)


def push_last_metrics(registry: CollectorRegistry, url: str, training_job: str, rank: int) -> None:
    """Push current metrics to a Pushgateway. If it does not answer, that is reported, and is not an error."""
    try:
        push_to_gateway(
            url,
            job="horovod_train",
            grouping_key={"training_job": training_job, "rank": str(rank)},
            registry=registry,
            timeout=PUSH_TIMEOUT_S,
        )
    except Exception as error:  # noqa: BLE001  (as above)
        log.warning("the last metrics were not pushed to %s: %s", url, error)
