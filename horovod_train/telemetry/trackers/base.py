"""Interface of experiment trackers, which store losses and metrics of runs for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from horovod_train.events.series import Series


@dataclass(frozen=True)
class TrackedRun:
    """Run that is tracked.

    Attributes:
        job: Resolved job, as JSON.
        folder: Folder that contains the runs of the job.
        step: Completed steps at the start; greater than 0 if training resumes from a checkpoint.
        versions: Versions of installed packages by name.
        history: Returns the values in the events of earlier runs of this job. A tracker that sends values
            later than they are logged adds those that a killed rank did not send.
    """

    job: Mapping[str, object]
    run_id: str
    folder: Path
    world_size: int
    step: int
    versions: Mapping[str, str] = field(default_factory=dict)
    history: Callable[[], Series] = dict

    def missing(self, last: Mapping[str, int]) -> list[tuple[int, dict[str, float]]]:
        """Return step and values of the history after the last stored step, up to the start of this run.

        Args:
            last: Last stored step, by kind (``kind_of``).
        """
        if not self.step:
            return []
        rows: dict[tuple[int, str], dict[str, float]] = {}
        for name, points in self.history().items():
            kind = kind_of([name])
            for step, value in points:
                if last[kind] < step <= self.step:
                    rows.setdefault((step, kind), {})[name] = value
        # A step precedes the evaluation after it.
        return [(step, values) for (step, _), values in sorted(rows.items(), key=_by_step)]


def _by_step(row: tuple[tuple[int, str], object]) -> tuple[int, bool]:
    (step, kind), _ = row
    return step, kind == "evaluation"


def kind_of(names: Iterable[str]) -> str:
    """Return whether values with some names are those of a ``step`` or of an ``evaluation``."""
    return "evaluation" if any(name.startswith("eval/") for name in names) else "step"


class OneValuePerStep:
    """Rule of trackers that cannot replace values: the first value of a step is kept.

    Args:
        last: Last stored step, by kind (``kind_of``).
        step: Completed steps at the start of this run.
        on_return: Called with the first step that is repeated after a return to a checkpoint.
    """

    def __init__(self, last: Mapping[str, int], step: int, on_return: Callable[[int], None]) -> None:
        self._last = dict(last)
        self._previous_step = step
        self._on_return = on_return

    def accepts(self, step: int, values: Iterable[str]) -> bool:
        """Return whether values of a step are stored, because neither this nor a later step was before."""
        kind = kind_of(values)
        is_repeated = step <= self._last[kind]
        if kind == "step":
            if is_repeated and step <= self._previous_step:
                self._on_return(step)
            self._previous_step = step
        if not is_repeated:
            self._last[kind] = step
        return not is_repeated

    @property
    def last_step(self) -> int:
        """Last step that was stored."""
        return self._last["step"]


SummaryValues = dict[str, float | str]
"""Values of a whole run: ``state`` (succeeded, preempted or failed), ``checkpoint`` (path of the newest one),
and for each rank ``own_s/rank_<n>`` (own time per step, in seconds) and ``waiting/rank_<n>`` (fraction of the
time spent waiting for later ranks), if the all-reduce wait is measured.
"""


class Tracker(Protocol):
    """Tracker, created with the job's ``args`` on rank 0.

    Its methods are called in its own thread, so that training does not wait for a slow tracker. After an
    exception, which is reported once, the tracker is disabled and training continues. If it also has a method
    ``summarize(values)``, this is called with ``SummaryValues`` before ``end``, unless the rank was killed. A
    job that ends waits longer for a tracker with a true attribute ``is_preparing``, such as one that creates
    a database on this machine.
    """

    def start(self, run: TrackedRun) -> None:
        """Start tracking; called when training starts or resumes."""
        ...

    def log(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Store values by name.

        Args:
            step: Completed optimizer steps. After a return to a checkpoint, it may be smaller than before:
                the later values are valid.
            epochs: Epochs passed; NaN: unknown.
            values: Of a step: ``loss``, ``lr``, ``samples_per_s`` of reported steps, and further values if
                computed, such as ``grad_norm``; of an evaluation: ``eval/<metric>``.
        """
        ...

    def end(self) -> None:
        """Stop tracking; called when training is complete, is preempted, or fails."""
        ...
