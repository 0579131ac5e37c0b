"""Location and build plan of the installed Horovod, without importing it."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

HOROVOD_VERSION = "0.28.1"
PLAN_FILE = "horovod_train_plan.json"
LOOPBACK_LIBRARY = "loopback.so"


def installed_plan() -> dict[str, Any] | None:
    """Return the build plan of the installed engine; None: Horovod is missing or was built otherwise."""
    package = horovod_folder()
    if package is None or not (package / PLAN_FILE).exists():
        return None
    document: dict[str, Any] = json.loads((package / PLAN_FILE).read_text())
    return document


def installed_key() -> str | None:
    """Return the key of the installed engine's build plan; None: there is no plan."""
    plan = installed_plan()
    return None if plan is None else str(plan["key"])


def loopback_library() -> Path | None:
    """Return the library with which mpirun listens on the loopback only; None: the engine has none."""
    folder = horovod_folder()
    library = folder and folder / LOOPBACK_LIBRARY
    return library if library and library.exists() else None


def horovod_folder() -> Path | None:
    """Return the folder of the installed Horovod; None: it is not installed."""
    try:
        return Path(str(metadata.distribution("horovod").locate_file("horovod")))
    except metadata.PackageNotFoundError:
        return None
