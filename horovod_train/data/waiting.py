"""Start time of this rank's current wait for data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic


@dataclass
class Waiting:
    """Start time of the current wait for a batch (``monotonic``); None: not waiting."""

    since_s: float | None = None


WAITING = Waiting()


def timed(batches: Iterator[object]) -> Iterator[object]:
    """Yield batches, and record the start time of each wait in ``WAITING``."""
    while True:
        WAITING.since_s = monotonic()
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            WAITING.since_s = None
        yield batch
