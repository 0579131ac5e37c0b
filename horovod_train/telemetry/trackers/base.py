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
        step: Steps made when it begins; more than none when it goes on from a checkpoint.
    """

    job: Mapping[str, object]
    run_id: str
    folder: Path
    world_size: int
    step: int


class Tracker(Protocol):
    """Is told of a run on rank 0, by one thread of its own: it may be slow, and no rank waits for it.

    It is made with ``args`` of the job by name. What it raises is told once; then it is left out, and
    training goes on.
    """

    def start(self, run: TrackedRun) -> None:
        """Training begins or goes on."""
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
