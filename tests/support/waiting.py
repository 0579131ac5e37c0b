"""For what other threads and processes do in their own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from support.launching import TIMEOUT_S


def wait_for_ranks(folder: Path, num_ranks: int = 2) -> None:
    """Return as soon as so many ranks of the task ``Noted`` train, whose notes are in a folder."""
    wait_until(lambda: len(list(folder.glob("rank-*.txt"))) >= num_ranks, TIMEOUT_S)


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Return as soon as a condition holds.

    Raises:
        AssertionError: It does not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
