"""Durations, positions and intervals of a training, in epochs, optimizer steps or samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
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
        exact = self.amount if isinstance(self.amount, int) else Fraction(str(self.amount))
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
