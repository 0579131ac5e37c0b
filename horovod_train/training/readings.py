"""What steps turned out to be, in their order, once it is known.

On a CPU a step's loss, norm and phases are there when it is made. On a device they may arrive while
later steps are under way: the host must not wait for them. Whoever has to know (before a save, at the
end of an epoch) waits for all that are outstanding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from horovod_train.data.shard import StepShare
from horovod_train.frameworks.base import Reading, StepOutcome

MAX_OUTSTANDING = 8  # more than this many steps late, the host waits


@dataclass(slots=True)  # frozen, it would take four times as long to make, in each step
class StepReport:
    """What hooks learn of a step.

    Attributes:
        step: Optimizer steps made then.
        epochs_passed: Epochs passed then, with the fraction of the current one.
        share: This rank's part of it.
        lr: Its learning rate.
        reading: What it did, once that is known.
    """

    step: int
    epochs_passed: float
    share: StepShare
    lr: float
    reading: Reading

    @property
    def outcome(self) -> StepOutcome:
        """What it did; waits until that is known, which it is when hooks are told."""
        return self.reading.outcome()


class Readings:
    """Steps that nobody has heard of yet."""

    def __init__(self) -> None:
        self._outstanding: deque[StepReport] = deque()

    def add(self, report: StepReport) -> None:
        """Add a step that was just made."""
        self._outstanding.append(report)

    def arrived(self) -> Iterator[StepReport]:
        """Yield what is known now, in the order of steps; wait for those that are too late."""
        waiting = self._outstanding
        while waiting and (waiting[0].reading.is_ready() or len(waiting) > MAX_OUTSTANDING):
            yield waiting.popleft()

    def all(self) -> Iterator[StepReport]:
        """Yield everything that is outstanding; wait for it."""
        while self._outstanding:
            yield self._outstanding.popleft()
