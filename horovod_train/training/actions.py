"""Actions of hooks other than to continue.

Every rank gives the same answer at the same step: it follows from what is equal on all of them (losses,
metrics, progress), or they have asked each other. The loop asks hooks in their order, and follows the
first answer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExitPreempted:
    """End this process with exit code 75: everything is saved, and another start continues.

    Attributes:
        step: Optimizer steps made.
    """

    step: int


@dataclass(frozen=True)
class Stop:
    """Training ends: evaluate and save as after the last epoch; another start resumes from there.

    Attributes:
        step: Optimizer steps made.
        why: Words for the log.
    """

    step: int
    why: str


@dataclass(frozen=True)
class RestoreCheckpoint:
    """Resume from a checkpoint of this run.

    Attributes:
        step: The step of the checkpoint.
        why: Words for the log.
    """

    step: int
    why: str


Action = ExitPreempted | Stop | RestoreCheckpoint
