"""Resources of this process, and optional packages.

    usable_cores, usable_memory_bytes   cores and memory that are available to this process, within limits
    import_optional                     import of optional packages
    versions_with                       versions of installed packages

Limits are those of containers and batch systems.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from horovod_train.errors import UserError

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Return the number of cores that this process is bound to, limited by its container's quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # cgroup v2: "max 100000", or microseconds in each period
        quota, period = (cgroup / "cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    with suppress(OSError, ValueError, ZeroDivisionError):  # cgroup v1; -1: no limit
        quota_us = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
        if quota_us > 0:
            return max(1, min(cores, math.ceil(quota_us / period_us)))
    return cores


def usable_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Return the available memory of this host in bytes, at most the container's limit."""
    free = psutil.virtual_memory().available
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2: "max", or bytes; v1
        with suppress(OSError, ValueError):
            return min(free, int((cgroup / limit).read_text()))
    return free


def import_optional(name: str, *, needed_by: str, hint: str) -> Any:
    """Import and return a module of an optional package.

    Raises:
        UserError: It cannot be imported; ``needed_by`` (a feature) and ``hint`` are parts of the message.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"{needed_by}: the package {name} cannot be imported: {error}", hint=hint) from error


def versions_with(framework: str) -> dict[str, str]:
    """Return the versions of this package, of Horovod and of a framework, as far as they are installed."""
    found = {}
    for name in ("horovod_train", "horovod", framework):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
