"""Tokens of the HTTP server, and what each of them allows.

A token file has one token per line, after its role; lines that start with # are comments:

    # notebooks
    read 6f1c0d4e8b...
    submit 94be77a2c1...
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Literal, get_args

from horovod_train.client.remote import API, TOKEN_VARIABLE
from horovod_train.errors import UserError

log = logging.getLogger(__name__)

Role = Literal["read", "end", "submit"]
"""Each role includes the earlier ones: read jobs; drain and cancel them; submit them."""

ROLES: tuple[Role, ...] = get_args(Role)
SAFE_METHODS = {"GET", "HEAD", "OPTIONS", "QUERY", "TRACE"}
SUBMIT_PATH = f"{API}/jobs"
MIN_CHARS = 16
MIN_DIFFERENT_CHARS = 6
"""A random token of 16 hexadecimal digits has fewer different ones three times in 100,000."""
RATE_PER_S = 50.0
BURST = 1000
"""Requests of a token: ``RATE_PER_S`` on average, and at most ``BURST`` at once."""


def role_needed(method: str, path: str) -> Role:
    """Return the role that a request needs."""
    if method in SAFE_METHODS:
        return "read"
    return "submit" if path == SUBMIT_PATH else "end"


@dataclass(frozen=True)
class AcceptedToken:
    """An accepted token: its role on this server, and its index, for the rate limit."""

    role: Role
    number: int


@dataclass
class RateLimit:
    """Rate limit of one access token (token-bucket algorithm)."""

    left: float = BURST
    updated_s: float = field(default_factory=monotonic)

    def take(self) -> float:
        """Count a request; return 0, or the seconds to wait before a retry."""
        now_s = monotonic()
        self.left = min(BURST, self.left + (now_s - self.updated_s) * RATE_PER_S)
        self.updated_s = now_s
        if self.left < 1:
            return (1 - self.left) / RATE_PER_S
        self.left -= 1
        return 0.0


class Tokens:
    """Accepted tokens.

    Args:
        page_token: Token with the role ``end``; it cannot submit jobs, because it is printed in an address.
        file: Token file; it is read again when it changes. None: no further tokens.
        max_role: Highest role of any token.

    Raises:
        UserError: The file cannot be read, is readable by other users, or has an invalid line.
    """

    def __init__(self, page_token: str, file: Path | None = None, max_role: Role = "read") -> None:
        self._page_token: list[tuple[Role, str]] = [("end", page_token)]
        self._file = file
        self._max_role = ROLES.index(max_role)
        self._version = _version(file)
        self._of_file = read_tokens(file) if file is not None else []

    def find(self, given: Iterable[str]) -> AcceptedToken | None:
        """Return the first accepted token; None: no token is accepted."""
        self._update()
        for token in given:
            found: AcceptedToken | None = None
            # All tokens are compared, so that the response time does not reveal which one matched.
            for number, (role, accepted) in enumerate([*self._page_token, *self._of_file]):
                if hmac.compare_digest(token.encode(), accepted.encode()):
                    found = AcceptedToken(ROLES[min(ROLES.index(role), self._max_role)], number)
            if found is not None:
                return found
        return None

    def _update(self) -> None:
        """Read the file again if it has changed. An invalid file is reported, and its tokens are removed."""
        version = _version(self._file)
        if self._file is None or version == self._version:
            return
        self._version = version
        try:
            self._of_file = read_tokens(self._file)
        except UserError as error:
            self._of_file = []
            log.warning("no token of %s is accepted: %s", self._file, error)


def _version(file: Path | None) -> tuple[int, int, int] | None:
    """Return values that change with the content of a file."""
    try:
        found = os.stat(file) if file is not None else None  # noqa: PTH116  (for each request)
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_ino, found.st_size)


def read_tokens(file: Path) -> list[tuple[Role, str]]:
    """Return the tokens of a file with their roles.

    Raises:
        UserError: The file cannot be read, is readable by other users, or has an invalid line.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            lines = opened.read().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"the token file {file} cannot be read: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"the token file {file} is accessible to other users (mode {stat.filemode(mode)})",
            hint=f"chmod 600 {file}, and replace its tokens",
        )
    tokens: list[tuple[Role, str]] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        role = next((each for each in ROLES if each == words[0]), None)
        is_weak = len(words) != 2 or len(words[1]) < MIN_CHARS or len(set(words[1])) < MIN_DIFFERENT_CHARS
        if role is None or is_weak:
            raise UserError(
                f"{file}:{number}: expected a role ({', '.join(ROLES)}) and a token of at least "
                f"{MIN_CHARS} characters, {MIN_DIFFERENT_CHARS} of them different",
                hint="generate one with `openssl rand -hex 32`",
            )
        tokens.append((role, words[1]))
    return tokens


def token_of_environment() -> str | None:
    """Return the token in the environment variable; None: it is not set, or empty."""
    return os.environ.get(TOKEN_VARIABLE) or None


def make_token() -> str:
    """Return a random token."""
    return os.urandom(16).hex()
