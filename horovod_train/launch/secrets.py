"""Values that ranks get but nobody else sees: not on command lines, in logs or in the folder of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from horovod_train.errors import UserError


def read_secrets(sources: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the value of each secret variable.

    Args:
        sources: ``env:NAME`` or ``file:/path`` for each variable.
        environ: Where ``env:`` looks.

    Raises:
        UserError: A value is not where it is said to be.
    """
    found = {}
    for name, source in sources.items():
        kind, _, where = source.partition(":")
        if kind == "env" and where in environ:
            found[name] = environ[where]
        elif kind == "file":
            try:
                found[name] = Path(where).read_text(encoding="utf-8").rstrip("\n")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not text"
                raise UserError(f"launch.secrets.{name}: {where} cannot be read: {reason}") from error
        else:
            raise UserError(
                f"launch.secrets.{name}: {source} is not set"
                if kind == "env"
                else f"launch.secrets.{name}: {source} exists on Kubernetes only",
                hint="export it before the launch, or take it from a file: file:/path",
            )
    return found


def without_secrets(sources: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that secrets are taken from."""
    hidden = {source.partition(":")[2] for source in sources.values() if source.startswith("env:")}
    return {name: value for name, value in environ.items() if name not in hidden}
