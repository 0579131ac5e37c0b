"""What steps turned out to be, in their order, once it is known.

On a CPU a step's loss, norm and phases are there when it is made. On a device they arrive while later
steps run: the host must not wait for them. Code that needs the results (before a save, at the end of an
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
        """Result of the step; waits for it. Hooks receive steps whose results are available."""
        return self.reading.outcome()


class PendingSteps:
    """Steps whose results were not passed to hooks yet.

    Args:
        lag_steps: Steps by which results are delivered later. The lag is fixed, and not "when available":
            ranks act on results, and have to do so after the same step.
    """

    def __init__(self, lag_steps: int = 0) -> None:
        self._lag_steps = lag_steps
        self._pending: deque[StepReport] = deque()

    def add(self, report: StepReport) -> None:
        """Add a step that was just made."""
        self._pending.append(report)

    def ready(self) -> Iterator[StepReport]:
        """Yield the steps whose results are due, in order."""
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
