"""Metrics endpoints of ranks, in the format of Prometheus' service discovery."""

from __future__ import annotations

import json
from collections.abc import Iterable

from horovod_train.events.types import Target


def parse_targets(text: str | bytes) -> list[Target]:
    """Parse a document of Prometheus' file or HTTP service discovery.

    Raises:
        ValueError: The document is not valid; also KeyError, TypeError or AttributeError.
    """
    return [
        Target(address=str(address), labels={str(k): str(v) for k, v in group.get("labels", {}).items()})
        for group in json.loads(text)
        for address in group["targets"]
    ]


def as_document(targets: Iterable[Target]) -> list[dict[str, object]]:
    """Return targets as a document of Prometheus' service discovery."""
    return [{"targets": [target.address], "labels": dict(target.labels)} for target in targets]
