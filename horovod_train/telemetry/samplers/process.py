"""Sampler of the memory of this process."""

from __future__ import annotations

import resource

import psutil

from horovod_train.telemetry.records import MemoryRecord


def read_memory() -> MemoryRecord:
    """Return the current and peak resident memory of this process."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return MemoryRecord(psutil.Process().memory_info().rss, peak_kib * 1024)
