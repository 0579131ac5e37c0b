"""Base class of the sections of a job description, and types that several sections use."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from horovod_train.config.duration import Duration

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
"""At most 63 letters, digits, dots, dashes and underscores, because names are used as labels and folders."""

ImportPath = Annotated[str, StringConstraints(pattern=r"^[^:\n]*[\w)]:[A-Za-z_]\w*$")]
"""``package.module:Name`` or ``path/to/file.py:Name``."""

HostSlots = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?:[1-9]\d{0,4}$")
]
"""``host:slots``, such as ``node01:8``."""


def name_of(entry: str) -> str:
    """Return the host name in ``host:slots``."""
    return entry.rpartition(":")[0]


def slots_of(entry: str) -> int:
    """Return the number of slots in ``host:slots``."""
    return int(entry.rpartition(":")[2])


def words_of(options: Iterable[str]) -> tuple[str, ...]:
    """Return options with their values as arguments of a command, split as a shell does.

    Raises:
        ValueError: An option has an unclosed quote.

    >>> words_of(["-q gpu", "-P 'my project'"])
    ('-q', 'gpu', '-P', 'my project')
    """
    return tuple(word for option in options for word in shlex.split(option))


def is_command(text: str) -> bool:
    """Return whether a text can be split into a program and arguments."""
    try:
        return bool(words_of([text]))
    except ValueError:
        return False


Fraction = Annotated[float, Field(gt=0, le=1)]
"""Number greater than 0, at most 1."""


def _as_pair(value: object) -> object:
    """Return a list as a tuple: YAML and JSON have lists only."""
    return tuple(value) if isinstance(value, list) else value


Point = Annotated[tuple[Duration, Annotated[float, Field(ge=0, le=1e12)]], BeforeValidator(_as_pair)]
Points = list[Point]
"""List of [position, value]; both are not negative."""

HostName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
"""Name or IPv4 address of a host."""

InterfaceName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]+$")]
"""Name of a network interface, such as ``eth0``."""

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Name of an environment variable."""

OneLine = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00]*$")]
"""Text without line breaks."""


ProgramOption = Annotated[str, StringConstraints(pattern=r"^--?[A-Za-z][^\n\r\x00]*$")]
"""Option of a program, with its value."""


def _as_ssh_writes(value: object) -> object:
    """Return a value as text, because YAML reads ``yes`` as a boolean and ``10`` as a number."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else value


SshValue = Annotated[OneLine, BeforeValidator(_as_ssh_writes)]
"""Value of an option of ssh_config."""

DNS_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
"""Regular expression of a DNS subdomain name in Kubernetes."""

MAX_DNS_NAME = 253
"""Maximum number of characters of a DNS subdomain name."""

SecretSource = Annotated[
    str,
    StringConstraints(
        pattern=rf"^(env:[A-Za-z_][A-Za-z0-9_]*|file:/\S+|kubernetes:{DNS_NAME}/[A-Za-z0-9._-]{{1,253}})$"
    ),
]
"""``env:NAME``, ``file:/path`` (the content of the file), or on Kubernetes ``kubernetes:secret/key``."""

Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


def _durations_as_text(schema: dict[str, Any]) -> None:
    """Write the default durations of a JSON schema as in a job description; pydantic writes their parts."""

    def text(value: object) -> object:
        if isinstance(value, list):
            return [text(each) for each in value]
        return str(Duration(**value)) if isinstance(value, dict) and "unit" in value else value

    for field in schema.get("properties", {}).values():
        if "default" in field:
            field["default"] = text(field["default"])


class Section(BaseModel):
    """Base class of all sections: frozen, strict, without unknown keys, with docstrings as descriptions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=False,
        json_schema_extra=_durations_as_text,
    )
