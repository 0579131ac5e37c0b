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


@dataclass(frozen=True)
class StepReport:
    """What hooks learn of a step.

    Attributes:
        step: Optimizer steps made then.
        epochs_passed: Epochs passed then, with the fraction of the current one.
        share: This rank's part of it.
        lr: Its learning rate.
        outcome: What it did.
    """

    step: int
    epochs_passed: float
    share: StepShare
    lr: float
    outcome: StepOutcome

    @property
    def num_local_samples(self) -> int:
        """Samples of the step that this rank read."""
        return sum(map(len, self.share.micro_batches))


@dataclass(frozen=True)
class StepMade:
    """A step whose outcome may not be known yet; attributes as in ``StepReport``."""

    step: int
    epochs_passed: float
    share: StepShare
    lr: float
    reading: Reading

    def report(self) -> StepReport:
        """Return the report; waits until the outcome is known."""
        return StepReport(self.step, self.epochs_passed, self.share, self.lr, self.reading.outcome())


class Readings:
    """Steps that nobody has heard of yet."""

    def __init__(self) -> None:
        self._outstanding: deque[StepMade] = deque()

    def add(self, made: StepMade) -> None:
        """Add a step that was just made."""
        self._outstanding.append(made)

    def arrived(self) -> Iterator[StepReport]:
        """Yield what is known now, in the order of steps; wait for those that are too late."""
        waiting = self._outstanding
        while waiting and (waiting[0].reading.is_ready() or len(waiting) > MAX_OUTSTANDING):
            yield waiting.popleft().report()

    def all(self) -> Iterator[StepReport]:
        """Yield everything that is outstanding; wait for it."""
        while self._outstanding:
            yield self._outstanding.popleft().report()
