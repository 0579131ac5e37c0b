"""Our worker, with all that is measured in every second block of steps only.

Two processes on a shared machine differ by more than what metrics cost. Neighbouring blocks of one
process do not. In a block without, steps are not recorded and ranks tell each other nothing of where their
time went. usage: as ``python -m horovod_train worker --events JOB``, with JOB alone
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from horovod_train import worker
from horovod_train.training.hooks.steps import AttributeWaiting, RecordMetrics

BLOCK_STEPS = 5


def is_recorded(step: int) -> bool:
    """Whether metrics are recorded for the step of that number, counted from 0."""
    return step // BLOCK_STEPS % 2 == 0


class InBlocks:
    """Lets hooks do something in every second block, the same ones on all ranks."""

    def __init__(self) -> None:
        self.is_on = True
        self._tell(RecordMetrics)
        self._tell(AttributeWaiting)
        payload, on_gathered = AttributeWaiting.payload, AttributeWaiting.on_gathered
        AttributeWaiting.payload = lambda hook: payload(hook) if self.is_on else b""  # type: ignore[method-assign]

        def hear_if_on(hook: AttributeWaiting, of_ranks: Sequence[bytes]) -> None:
            if self.is_on:
                on_gathered(hook, of_ranks)

        AttributeWaiting.on_gathered = hear_if_on  # type: ignore[method-assign]

    def _tell(self, kind: Any) -> None:
        plain: Callable[..., None] = kind.on_result

        def on_result(hook: Any, run: Any, report: Any) -> None:
            self.is_on = is_recorded(report.step - 1)
            if self.is_on:
                plain(hook, run, report)

        kind.on_result = on_result


if __name__ == "__main__":
    InBlocks()
    sys.exit(worker.main(worker.WorkerOptions(Path(sys.argv[1]), as_events=True)))
