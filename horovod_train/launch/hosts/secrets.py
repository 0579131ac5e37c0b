"""Secrets of ranks, which are not written to command lines, logs or the run folder."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from horovod_train.errors import UserError

MIN_HIDDEN_CHARS = 6
"""Shorter values are not hidden, because too much of the output would be replaced."""


class Mask:
    """Replacement of secrets by asterisks, line by line.

    A secret with several lines is hidden in each of its lines, and in the escaped forms of JSON and ``repr``.
    """

    def __init__(self, secrets: Collection[str] = ()) -> None:
        lines = {line.strip() for secret in secrets for line in secret.splitlines()}
        pieces = {piece for piece in {*secrets, *lines} if len(piece) >= MIN_HIDDEN_CHARS}
        escaped = {json.dumps(piece)[1:-1] for piece in pieces} | {repr(piece)[1:-1] for piece in pieces}
        # The longest first, because a secret may be a prefix of another.
        self._pieces = sorted(pieces | escaped, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Return a line with the secrets in it replaced."""
        for piece in self._pieces:
            text = text.replace(piece, "***")
        return text


def too_short_to_hide(secrets: Mapping[str, str]) -> list[str]:
    """Return the names of secrets that logs would show, because all of their lines are too short."""
    return [
        name
        for name, value in sorted(secrets.items())
        if value and not any(len(line.strip()) >= MIN_HIDDEN_CHARS for line in value.splitlines())
    ]


def read_secrets(sources: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of secret variables, by name.

    Args:
        sources: ``env:NAME`` or ``file:/path`` for each variable.
        environ: Environment for ``env:`` sources.

    Raises:
        UserError: A source does not exist, or cannot be read.
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
    """Return an environment without the variables that are sources of secrets."""
    hidden = {source.partition(":")[2] for source in sources.values() if source.startswith("env:")}
    return {name: value for name, value in environ.items() if name not in hidden}
