"""Actions that hooks return; None: continue.

A hook must return the same action at the same step on every rank. It derives the action from values that are
equal on all ranks (losses, metrics, progress) or that were exchanged. Only the first action is performed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExitPreempted:
    """Exit with code 75 after ``step`` optimizer steps: a checkpoint is saved, and the next start resumes."""

    step: int


@dataclass(frozen=True)
class Stop:
    """End training after ``step`` optimizer steps: evaluate and save as after the last epoch.

    The next start resumes from this checkpoint. ``why`` is the reason in the log.
    """

    step: int
    why: str


@dataclass(frozen=True)
class RestoreCheckpoint:
    """Resume from this run's checkpoint of ``step``. ``why`` is the reason in the log."""

    step: int
    why: str


Action = ExitPreempted | Stop | RestoreCheckpoint
