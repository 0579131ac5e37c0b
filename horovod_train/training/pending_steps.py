"""What steps turned out to be, in their order, once it is known.

On a CPU a step's loss, norm and phases are there when it is made. On a device they arrive while later
steps are under way: the host must not wait for them. Whoever has to know (before a save, at the end of an
epoch) waits for all that are outstanding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic, sleep

from horovod_train.data.shard import StepShare
from horovod_train.frameworks.base import Reading, StepOutcome

DRAIN_TIMEOUT_S = 5.0


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


class PendingSteps:
    """Steps that nobody has heard of yet.

    Args:
        lag_steps: A step is told when so many others were made after it. Not when it happens to be there:
            ranks act on what they are told, and have to do so after the same step.
    """

    def __init__(self, lag_steps: int = 0) -> None:
        self._lag_steps = lag_steps
        self._pending: deque[StepReport] = deque()

    def add(self, report: StepReport) -> None:
        """Add a step that was just made."""
        self._pending.append(report)

    def ready(self) -> Iterator[StepReport]:
        """Yield the steps that are to be told now, in their order."""
        while len(self._pending) > self._lag_steps:
            yield self._pending.popleft()

    def all(self) -> Iterator[StepReport]:
        """Yield everything that is outstanding; wait for it."""
        while self._pending:
            yield self._pending.popleft()

    def drain(self) -> Iterator[StepReport]:
        """Yield what is outstanding and there, or comes within some seconds.

        Of a training that has failed: a device may stand still, or wait for a rank that is gone.
        """
        until_s = monotonic() + DRAIN_TIMEOUT_S
        while self._pending:
            while not self._pending[0].reading.is_ready():
                if monotonic() > until_s:
                    return
                sleep(0.01)
            yield self._pending.popleft()

    def clear(self) -> None:
        """Drop what is outstanding."""
        self._pending.clear()
