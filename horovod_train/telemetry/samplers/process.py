"""Memory of this process on its host."""

from __future__ import annotations

import resource

import psutil

from horovod_train.telemetry.records import MemoryRecord


def read_memory() -> MemoryRecord:
    """Return what this process has in memory, and the most it has had."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return MemoryRecord(psutil.Process().memory_info().rss, peak_kib * 1024)
