"""Base class of the sections of a job description, and types that several sections use.

    Section               base class of the sections
    Duration              durations, positions and intervals of a training, in epochs, optimizer steps or
                          samples
    with_present_names, present_path, set_field
                          names of fields in previous versions

Names of fields in previous versions are still read.
"""

from __future__ import annotations

import fractions
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
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


RENAMED: Mapping[str, Mapping[str, str]] = {
    "lr": {"warmup_epochs": "warmup"},
    "train": {"compile_backend": "compile"},
    "train.batch_warmup": {"epochs": "length"},
    "evaluation": {"every_epochs": "every"},
}
"""Present names by former names, by section."""
CONVERTED: Mapping[tuple[str, str], Callable[[object], object]] = {
    ("train", "compile_backend"): lambda backend: None if backend is None else {"backend": backend},
}
"""Conversions of values whose form has changed."""
DECAY_ARGS: Mapping[str, tuple[str, object]] = {
    "milestones": ("milestones", []),
    "milestones_epochs": ("milestones", []),
    "gamma": ("gamma", 0.1),
    "points": ("points", []),
    "power": ("power", 1.0),
    "end_factor": ("end_factor", 0.0),
    "first_cycle": ("first_cycle", None),
    "restart_epochs": ("first_cycle", None),
    "restart_factor": ("restart_factor", 1.0),
    "cooldown_fraction": ("cooldown_fraction", 0.2),
    "cooldown_shape": ("cooldown_shape", "sqrt"),
    "rise_fraction": ("rise_fraction", 0.3),
    "start_factor": ("start_factor", 0.04),
    "plateau": ("", None),
}
"""Former fields of ``lr``: their names in ``lr.decay_args`` now, and their defaults, which are left out.

``lr.plateau`` was a section: its fields are arguments now.
"""
CHECKPOINTS = {"every_epochs": "epoch", "every_steps": "step"}
"""Former intervals of checkpoints, which are elements of ``checkpoint.every`` now, and their units."""


def with_present_names(section: str, values: object) -> object:
    """Return the values of a section with present names of fields.

    Raises:
        ValueError: The section has a field under both names.

    >>> with_present_names("lr", {"warmup_epochs": 5})
    {'warmup': 5}
    """
    if not isinstance(values, dict):
        return values
    found = dict(values)
    for old, new in RENAMED.get(section, {}).items():
        if old in found:
            value = found.pop(old)
            if new in found:
                raise ValueError(f"{old} is {new} now, and both are there: leave {old} out")
            found[new] = CONVERTED.get((section, old), _same)(value)
    if section == "lr":
        found = _with_decay_args(found)
    if section == "checkpoint" and (old_names := CHECKPOINTS.keys() & found.keys()):
        if "every" in found:
            raise ValueError(f"{min(old_names)} is every now, and both are there: leave {min(old_names)} out")
        epochs, steps = found.pop("every_epochs", 1), found.pop("every_steps", None)
        found["every"] = [*_interval(epochs, "epoch"), *_interval(steps, "step")]
    return found


def _with_decay_args(values: dict[str, object]) -> dict[str, object]:
    """Return the values of ``lr`` with arguments of the schedule in ``decay_args``."""
    former = [name for name in values if name in DECAY_ARGS]
    if not former or not isinstance(values.get("decay_args", {}), dict):
        return values
    args: dict[str, object] = dict(values.get("decay_args", {}))  # type: ignore[call-overload]
    for old in former:
        value, (new, default) = values[old], DECAY_ARGS[old]
        moved = {new: value} if new else value
        if value == default or not isinstance(moved, dict):
            continue
        if both := args.keys() & moved.keys():
            raise ValueError(f"{old} is decay_args.{min(both)} now, and both are there: leave {old} out")
        args.update(moved)
    return {**{name: value for name, value in values.items() if name not in DECAY_ARGS}, "decay_args": args}


def present_path(dotted: str) -> str:
    """Return the present path of a former argument of a schedule.

    >>> present_path("lr.end_factor"), present_path("lr.plateau.patience"), present_path("lr.plateau")
    ('lr.decay_args.end_factor', 'lr.decay_args.patience', 'lr.decay_args')
    """
    section, _, field = dotted.partition(".")
    old, _, rest = field.partition(".")
    if section != "lr" or old not in DECAY_ARGS:
        return dotted
    return ".".join(part for part in ("lr", "decay_args", DECAY_ARGS[old][0], rest) if part)


def set_field(values: dict[str, object], section: str, field: str, value: object) -> None:
    """Set a field of a section by its present or former name; it replaces the value under both names.

    >>> values = {"every": ["1 epoch", "9 steps"]}
    >>> set_field(values, "checkpoint", "every_steps", 5)
    >>> values
    {'every': ['1 epoch', '5 steps']}
    """
    names = RENAMED.get(section, {})
    if field in names:
        values.pop(field, None)
        values[names[field]] = CONVERTED.get((section, field), _same)(value)
        return
    if section == "checkpoint" and field in CHECKPOINTS and "every" in values:
        present = values["every"]
        listed = present if isinstance(present, list) else [] if present is None else [present]
        unit = CHECKPOINTS[field]
        kept = [each for each in listed if unit not in (each if isinstance(each, str) else f"{each} epoch")]
        values["every"] = [*kept, *_interval(value, unit)]
        return
    formers = [old for old, new in names.items() if new == field]
    for old in CHECKPOINTS if (section, field) == ("checkpoint", "every") else formers:
        values.pop(old, None)
    values[field] = value


def _interval(value: object, unit: str) -> list[object]:
    return [] if value is None else [value if unit == "epoch" else f"{value} {unit}s"]


def _same(value: object) -> object:
    return value
