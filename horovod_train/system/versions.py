"""Versions of installed packages."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def versions_with(framework: str) -> dict[str, str]:
    """Return the versions of this package, of Horovod and of a framework, as far as they are installed."""
    found = {}
    for name in ("horovod_train", "horovod", framework):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
