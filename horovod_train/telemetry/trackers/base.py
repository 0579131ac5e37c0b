"""What a tracker is: it keeps the losses and metrics of runs, for people who compare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked.

    Attributes:
        job: The resolved job, as JSON has it.
        run_id: Name of this run of it.
        folder: Where runs of the job are kept.
        world_size: Ranks.
        step: Steps made when it begins; more than none when it resumes from a checkpoint.
    """

    job: Mapping[str, object]
    run_id: str
    folder: Path
    world_size: int
    step: int


class Tracker(Protocol):
    """Called on rank 0, in its own thread: it may be slow, and no rank waits for it.

    It is created with the job's ``args``. An exception is reported once; then the tracker is disabled,
    and training continues.
    """

    def start(self, run: TrackedRun) -> None:
        """Training begins or continues."""
        ...

    def log(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Keep values by name.

        Args:
            step: Optimizer steps made then. It may be smaller than before when training has gone back to a
                checkpoint: what is logged later counts.
            epochs: Epochs passed then.
            values: Of a step ``loss``, ``lr`` and, where it was taken, ``grad_norm``; of an evaluation
                ``eval/<metric>``.
        """
        ...

    def end(self) -> None:
        """Training is over: done, left or failed."""
        ...
