"""Our worker, whose trackers receive the steps of every second block only.

A tracker sends values seconds after the step, so blocks are long, and means are compared. A queue that is
not empty at the end of a block would count for the other kind: the first steps of a block are left out.
usage: as ``python -m horovod_train worker --events JOB``, with JOB alone
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from horovod_train import worker
from horovod_train.training.hooks.steps import Track

BLOCK_STEPS = 60
SETTLING_STEPS = 15


def is_tracked(step: int) -> bool | None:
    """Whether values of the step of that number, counted from 0, are tracked; None: it is not compared.

    The first two blocks are not, because MLflow and W&B are imported meanwhile.
    """
    block, place = divmod(step, BLOCK_STEPS)
    return None if block < 2 or place < SETTLING_STEPS else block % 2 == 0


def track_in_blocks() -> None:
    """Let the hook of trackers ignore every second block."""
    plain: Any = Track.on_result

    def on_result(hook: Any, run: Any, report: Any) -> None:
        if (report.step - 1) // BLOCK_STEPS % 2 == 0:
            plain(hook, run, report)

    Track.on_result = on_result  # type: ignore[method-assign]


if __name__ == "__main__":
    track_in_blocks()
    sys.exit(worker.main(worker.WorkerOptions(Path(sys.argv[1]), as_events=True)))
