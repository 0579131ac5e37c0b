"""A schedule with arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Self

from pydantic import Field

from horovod_train.config.fields import Duration, Interval
from horovod_train.lr.schedules import Position, Schedule


class Triangle(Schedule):
    """The rate falls to ``low`` and rises again, in each period."""

    period: Interval
    """Length of a period."""

    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Lowest rate as a fraction of the peak rate."""

    def at(self, position: Position) -> float:
        """Return the factor.

        >>> [Triangle(period=2).at(Position(epochs, 0, 8)) for epochs in (0, 0.5, 1, 2)]
        [1.0, 0.5, 0.0, 1.0]
        """
        phase = (position.epochs / self.period.epochs) % 1.0
        return self.low + (1 - self.low) * abs(1 - 2 * phase)

    @property
    def durations(self) -> Sequence[Duration]:
        """The period."""
        return [self.period]

    def in_epochs(self, convert: Callable[[Duration], Duration], warmup: Duration) -> Self:
        """Return the schedule with a period in epochs."""
        del warmup
        return self.model_copy(update={"period": convert(self.period)})
