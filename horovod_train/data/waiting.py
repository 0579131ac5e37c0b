"""Since when this rank has been waiting for its data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic


@dataclass
class Waiting:
    """Since when this process has been waiting for a batch, by the monotonic clock; None: it is not."""

    since_s: float | None = None


WAITING = Waiting()


def timed(batches: Iterator[object]) -> Iterator[object]:
    """Yield batches; while one is waited for, ``WAITING`` says since when."""
    while True:
        WAITING.since_s = monotonic()
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            WAITING.since_s = None
        yield batch
