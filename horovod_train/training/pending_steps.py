"""Queue of steps whose results are pending.

On a CPU, loss, gradient norm and phases are available after the step. On a device, they become available
while later steps run, and the host must not wait for them in each step. Code that requires the results
(before a save, at the end of an epoch) waits for all pending steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic, sleep

from horovod_train.data.shard import StepShare
from horovod_train.frameworks.base import PendingOutcome, StepOutcome

DRAIN_TIMEOUT_S = 5.0


@dataclass(slots=True)  # not frozen: creating a frozen instance takes four times as long
class StepReport:
    """Description of a step for hooks.

    Attributes:
        step: Number of optimizer steps performed, including this one.
        epochs_passed: Epochs passed after this step, with the fraction of the current one.
        share: This rank's part of the step's samples.
        lr: Learning rate of the step.
        pending_outcome: Future of the result.
        derived: Numbers that a hook has derived from the results of steps, by name in the catalog of metrics.
    """

    step: int
    epochs_passed: float
    share: StepShare
    lr: float
    pending_outcome: PendingOutcome
    derived: dict[str, float] = field(default_factory=dict)

    @property
    def numbers(self) -> Mapping[str, float | None]:
        """Numbers of the result, and derived numbers; waits for the result."""
        return {**self.outcome.numbers, **self.derived}

    @property
    def outcome(self) -> StepOutcome:
        """Result of the step; waits for it. Hooks receive steps whose results are available."""
        return self.pending_outcome.outcome()


class PendingSteps:
    """Steps whose results have not been passed to hooks yet.

    Results are delivered ``lag_steps`` steps later. The delay is fixed and does not depend on availability,
    because all ranks must act on a result after the same step.
    """

    def __init__(self, lag_steps: int = 0) -> None:
        self._lag_steps = lag_steps
        self._pending: deque[StepReport] = deque()

    def add(self, report: StepReport) -> None:
        """Add the latest step."""
        self._pending.append(report)

    def ready(self) -> Iterator[StepReport]:
        """Yield the steps whose results are due, in order."""
        while len(self._pending) > self._lag_steps:
            yield self._pending.popleft()

    def all(self) -> Iterator[StepReport]:
        """Yield all pending steps. Their ``outcome`` waits for the result."""
        while self._pending:
            yield self._pending.popleft()

    def drain(self) -> Iterator[StepReport]:
        """Yield steps with results available in ``DRAIN_TIMEOUT_S``, because a failed device may hang."""
        until_s = monotonic() + DRAIN_TIMEOUT_S
        while self._pending:
            while not self._pending[0].pending_outcome.is_ready():
                if monotonic() > until_s:
                    return
                sleep(0.01)
            yield self._pending.popleft()

    def clear(self) -> None:
        """Discard all pending steps."""
        self._pending.clear()
