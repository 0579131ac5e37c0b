"""Our worker, with metrics recorded in every second block of steps only.

Two processes on a shared machine differ by more than what metrics cost. Neighbouring blocks of one
process do not. usage: as ``python -m horovod_train worker --events JOB``, with JOB alone
"""

from __future__ import annotations

import sys
from pathlib import Path

from horovod_train import worker
from horovod_train.training.hooks.metrics import RecordMetrics
from horovod_train.training.run import Run, StepReport

BLOCK_STEPS = 5


def is_recorded(step: int) -> bool:
    """Whether metrics are recorded for the step of that number, counted from 0."""
    return step // BLOCK_STEPS % 2 == 0


if __name__ == "__main__":
    record = RecordMetrics.on_step

    def record_in_blocks(self: RecordMetrics, run: Run, report: StepReport) -> None:
        """Record a step, or not."""
        if is_recorded(run.progress.step - 1):
            record(self, run, report)

    RecordMetrics.on_step = record_in_blocks  # type: ignore[method-assign]
    sys.exit(worker.main(worker.WorkerOptions(Path(sys.argv[1]), as_events=True)))
