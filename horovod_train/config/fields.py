"""Base class of the sections of a job description, and types that several sections use.

    Section     base class of the sections
    Duration    durations, positions and intervals of a training, in epochs, optimizer steps or samples

The other types restrict texts and numbers.
"""

from __future__ import annotations

import fractions
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

Unit = Literal["epochs", "steps", "samples"]

MAX_AMOUNTS: dict[Unit, int] = {"epochs": 10**6, "steps": 2**53, "samples": 2**53}
"""Maximum amount of each unit."""

TEXT = re.compile(r"\s*((?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(epoch|step|sample)s?\s*")
EXAMPLES = "'5 epochs', '500 steps' or '100000 samples'; a number without a unit is a number of epochs"


@dataclass(frozen=True)
class Duration:
    """A duration, or a position counted from the start of the training.

    Attributes:
        amount: Number of units, at least 0; whole, unless the unit is epochs.
        unit: epochs, steps (of the optimizer) or samples.
    """

    amount: float
    unit: Unit = "epochs"

    def __str__(self) -> str:
        r"""Return the text in a job description.

        >>> str(Duration(1, "steps")), str(Duration(2.5)), str(Duration(10**7, "samples"))
        ('1 step', '2.5 epochs', '10000000 samples')
        """
        amount = int(self.amount) if self.amount == int(self.amount) else self.amount
        return f"{amount} {self.unit.removesuffix('s') if amount == 1 else self.unit}"

    @property
    def epochs(self) -> float:
        """Number of epochs. Durations of a schedule are converted to epochs before it is used.

        Raises:
            ValueError: The unit is another one.
        """
        if self.unit != "epochs":
            raise ValueError(f"{self} is not converted to epochs")
        return self.amount

    def num_passed(self, *, step: int, num_samples: int, samples_per_epoch: int) -> int:
        """Return how often an interval of this duration has passed since the start of the training.

        Args:
            step: Optimizer steps performed.
            num_samples: Samples used, in all epochs.
            samples_per_epoch: Samples of an epoch.

        >>> [Duration(0.1).num_passed(step=0, num_samples=n, samples_per_epoch=50) for n in (14, 15, 50)]
        [2, 3, 10]
        """
        # A fraction only where it is needed: this is called several times in each step. 0.1 is a tenth.
        exact = self.amount if isinstance(self.amount, int) else fractions.Fraction(str(self.amount))
        if self.unit == "steps":
            return step // exact
        return num_samples // (exact * samples_per_epoch if self.unit == "epochs" else exact)

    @classmethod
    def of(cls, value: object) -> Duration:
        """Return the duration of a value in a job description.

        Raises:
            ValueError: The value is not a duration.

        >>> Duration.of(3), Duration.of("500 steps"), Duration.of("1e6 samples")
        (Duration(amount=3, unit='epochs'), Duration(amount=500, unit='steps'), \
Duration(amount=1000000, unit='samples'))
        """
        if isinstance(value, Duration):
            return value
        unit: Unit = "epochs"
        if isinstance(value, str) and (match := TEXT.fullmatch(value)):
            number, word = match.groups()
            amount: float = float(number)
            unit = next(each for each in get_args(Unit) if each.startswith(word))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            amount = value
        else:
            raise ValueError(f"must be a duration, such as {EXAMPLES}")
        if not 0 <= amount <= MAX_AMOUNTS[unit]:  # also NaN
            raise ValueError(f"must be at least 0 and at most {MAX_AMOUNTS[unit]} {unit}")
        if amount == int(amount):
            return cls(int(amount), unit if amount else "epochs")
        if unit != "epochs":
            raise ValueError(f"must be a whole number of {unit}")
        return cls(amount, unit)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema for a number or a text; as JSON, a duration is a text."""
        del source, handler
        return core_schema.no_info_plain_validator_function(
            cls.of, serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json")
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON schema: a number of epochs, or a text."""
        del schema, handler
        return {"type": ["number", "string"], "minimum": 0, "pattern": f"^{TEXT.pattern}$"}


def _more_than_none(duration: Duration) -> Duration:
    if duration.amount == 0:
        raise ValueError("must be greater than 0")
    return duration


def increasing(positions: Sequence[Duration], *, strictly: bool = False) -> None:
    """Check that positions increase and have one unit: units can be compared only when data are read.

    Raises:
        ValueError: They do not.
    """
    if len({each.unit for each in positions if each.amount}) > 1:
        raise ValueError("must have positions in one unit")
    amounts = [each.amount for each in positions]
    if strictly and len(set(amounts)) < len(amounts):
        raise ValueError("must be strictly increasing")
    if amounts != sorted(amounts):
        raise ValueError("must have increasing positions")


Interval = Annotated[Duration, AfterValidator(_more_than_none)]
"""A duration greater than 0."""


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
