"""Import packages that an installation may lack."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from horovod_train.errors import UserError


def import_optional(name: str, *, needed_by: str, hint: str) -> Any:
    """Import and return a module of a package that this package does not require.

    Args:
        name: Name of the module.
        needed_by: The feature that needs it, for the message of an error.
        hint: How to install it.

    Raises:
        UserError: It cannot be imported.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"{needed_by}: the package {name} cannot be imported: {error}", hint=hint) from error
