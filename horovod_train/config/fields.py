"""What the sections of a job description are made of: their base, and types that several of them use."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
"""Letters, digits, dots, dashes and underscores; at most 63: it becomes a label and a folder."""

ImportPath = Annotated[str, StringConstraints(pattern=r"^[^:\n]*[\w)]:[A-Za-z_]\w*$")]
"""``package.module:Name`` or ``path/to/file.py:Name``."""

HostSlots = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?:[1-9]\d{0,4}$")
]
"""``host:slots``, such as ``node01:8``."""


def name_of(entry: str) -> str:
    """Return the host of ``host:slots``."""
    return entry.rpartition(":")[0]


def slots_of(entry: str) -> int:
    """Return the slots of ``host:slots``."""
    return int(entry.rpartition(":")[2])


Fraction = Annotated[float, Field(gt=0, le=1)]
"""A number greater than 0, at most 1."""

HostName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
"""Name or IPv4 address of a host."""

InterfaceName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]+$")]
"""Name of a network interface, such as ``eth0``."""

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Name of an environment variable."""

OneLine = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00]*$")]
"""Text without line breaks."""


def _as_ssh_writes(value: object) -> object:
    """YAML takes ``yes`` for true and ``10`` for a number; ssh means the words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else value


SshValue = Annotated[OneLine, BeforeValidator(_as_ssh_writes)]
"""Value of an option of ssh_config."""

DNS_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
"""Regular expression of what Kubernetes calls a DNS subdomain."""

MAX_DNS_NAME = 253
"""So many characters it may have."""

SecretSource = Annotated[
    str,
    StringConstraints(
        pattern=rf"^(env:[A-Za-z_][A-Za-z0-9_]*|file:/\S+|kubernetes:{DNS_NAME}/[A-Za-z0-9._-]{{1,253}})$"
    ),
]
"""``env:NAME``, ``file:/path`` (its content), or on Kubernetes ``kubernetes:secret/key``."""

Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all sections: frozen, strict, no unknown keys, docstrings as descriptions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=False,
    )
