"""The Horovod that is installed, without importing it: where it is, and what it was built from."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

HOROVOD_VERSION = "0.28.1"
PLAN_FILE = "horovod_train_plan.json"
LOOPBACK_LIBRARY = "loopback.so"


def installed_plan() -> dict[str, Any] | None:
    """Return what the installed engine was built from; None when this package did not install one."""
    package = _horovod_folder()
    if package is None or not (package / PLAN_FILE).exists():
        return None
    document: dict[str, Any] = json.loads((package / PLAN_FILE).read_text())
    return document


def installed_key() -> str | None:
    """Return the key of the installed engine."""
    plan = installed_plan()
    return None if plan is None else str(plan["key"])


def loopback_library() -> Path | None:
    """Return the library that lets mpirun listen on the loopback only; None: this engine has none."""
    folder = _horovod_folder()
    library = folder and folder / LOOPBACK_LIBRARY
    return library if library and library.exists() else None


def _horovod_folder() -> Path | None:
    """Return the folder of the installed Horovod, without importing it."""
    try:
        return Path(str(metadata.distribution("horovod").locate_file("horovod")))
    except metadata.PackageNotFoundError:
        return None
