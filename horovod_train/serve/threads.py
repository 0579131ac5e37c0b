"""Threads of the HTTP API, by kind of work, so that slow work of one kind does not block the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

Result = TypeVar("Result")


class Threads:
    """Limits of the number of threads. Calls above a limit wait."""

    def __init__(self) -> None:
        self._files = CapacityLimiter(16)
        self._launchers = CapacityLimiter(24)
        self._submissions = CapacityLimiter(8)
        self._whole_runs = CapacityLimiter(2)

    async def read(self, call: Callable[[], Result]) -> Result:
        """Call a function that reads a small file, or a part of a file."""
        return await to_thread.run_sync(call, limiter=self._files)

    async def query(self, call: Callable[[], Result]) -> Result:
        """Call a function that queries, or ends, a job through its launcher."""
        return await to_thread.run_sync(call, limiter=self._launchers)

    async def submit(self, call: Callable[[], Result]) -> Result:
        """Call a function that starts a job."""
        return await to_thread.run_sync(call, limiter=self._submissions)

    async def read_run(self, call: Callable[[], Result]) -> Result:
        """Call a function that reads all events of a run, which need hundreds of megabytes."""
        return await to_thread.run_sync(call, limiter=self._whole_runs)
