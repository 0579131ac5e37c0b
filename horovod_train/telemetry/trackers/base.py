"""Interface of experiment trackers, which store losses and metrics of runs for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class TrackedRun:
    """Run that is tracked.

    Attributes:
        job: Resolved job, as JSON.
        folder: Folder that contains the runs of the job.
        step: Completed steps at the start; greater than 0 if training resumes from a checkpoint.
        versions: Versions of installed packages by name.
    """

    job: Mapping[str, object]
    run_id: str
    folder: Path
    world_size: int
    step: int
    versions: Mapping[str, str] = field(default_factory=dict)


class Tracker(Protocol):
    """Tracker, created with the job's ``args`` on rank 0.

    Its methods are called in its own thread, so that training does not wait for a slow tracker. After an
    exception, which is reported once, the tracker is disabled and training continues.
    """

    def start(self, run: TrackedRun) -> None:
        """Start tracking; called when training starts or resumes."""
        ...

    def log(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Store values by name.

        Args:
            step: Completed optimizer steps. After a return to a checkpoint, it may be smaller than before:
                the later values are valid.
            epochs: Epochs passed.
            values: Of a step: ``loss``, ``lr``, and further numbers if computed, such as ``grad_norm``; of an
                evaluation: ``eval/<metric>``.
        """
        ...

    def end(self) -> None:
        """Stop tracking; called when training is complete, is preempted, or fails."""
        ...
