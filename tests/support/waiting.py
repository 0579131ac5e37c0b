"""For what other threads and processes do in their own time."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Return as soon as a condition holds.

    Raises:
        AssertionError: It does not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
