"""Reporting of events through Python's logging, for code without a reporter."""

from __future__ import annotations

import logging

from horovod_train.events.text import as_text
from horovod_train.events.types import Event

log = logging.getLogger(__name__)


def log_event(event: Event) -> None:
    """Log an event as a warning. The log record has the event as attribute ``event``."""
    log.warning("%s", as_text(event, 0), extra={"event": event})
