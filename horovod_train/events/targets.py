"""Where ranks serve their metrics, in the form that Prometheus' service discovery reads."""

from __future__ import annotations

import json
from collections.abc import Iterable

from horovod_train.events.types import Target


def parse_targets(text: str | bytes) -> list[Target]:
    """Return the targets of a document as Prometheus wants it, from a file or over HTTP.

    Raises:
        ValueError: It is not such a document; or a KeyError, TypeError or AttributeError.
    """
    return [
        Target(address=str(address), labels={str(k): str(v) for k, v in group.get("labels", {}).items()})
        for group in json.loads(text)
        for address in group["targets"]
    ]


def as_document(targets: Iterable[Target]) -> list[dict[str, object]]:
    """Return targets as Prometheus wants them."""
    return [{"targets": [target.address], "labels": dict(target.labels)} for target in targets]
