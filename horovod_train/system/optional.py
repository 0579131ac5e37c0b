"""Import of optional packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from horovod_train.errors import UserError


def import_optional(name: str, *, needed_by: str, hint: str) -> Any:
    """Import and return a module of an optional package.

    Raises:
        UserError: It cannot be imported; ``needed_by`` (a feature) and ``hint`` are parts of the message.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"{needed_by}: the package {name} cannot be imported: {error}", hint=hint) from error
