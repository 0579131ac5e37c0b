"""Contents of a report, read from run folders. The same files give the same contents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import TypeVar

from horovod_train.config.flatten import flat
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.events.file import EVENTS_FILE, Record
from horovod_train.events.series import Series, series_of
from horovod_train.events.types import Attempt, CheckpointWritten, Event, Opened, Progress
from horovod_train.launch.base import JobStatus
from horovod_train.monitor.history import MAX_READ_BYTES, History, parsed
from horovod_train.monitor.rank_series import Window, joined
from horovod_train.monitor.runs import Run, folders_of_runs, places_of
from horovod_train.system.files import open_regular

MAX_RUNS = 50

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class RunRecord:
    """Run of a report.

    Attributes:
        name: Job and run.
        history: Events, without limits of time.
        series: Values by step.
        losses: Time and loss of the reported steps, oldest first.
        checkpoints: Time and event of each written checkpoint, and of each that could not be written.
        attempts: Starts of the ranks, oldest first.
        package_version: Version of this package; empty: unknown.
        end_unix_s: Time of the last event; None: the run has no events.
        job: Fields of the job by dotted path; empty for scripts and own loops.
    """

    name: str
    status: JobStatus
    history: History
    series: Series
    losses: list[tuple[float, float | None]]
    checkpoints: list[tuple[float, CheckpointWritten]]
    attempts: list[Attempt]
    package_version: str
    end_unix_s: float | None
    job: dict[str, str]

    @property
    def num_ranks(self) -> int | None:
        """Number of ranks of the last start of training; None: unknown."""
        started = self.history.started
        return started.world_size if started else self.history.ranks.num_ranks or None

    @property
    def samples_per_s(self) -> float | None:
        """Median throughput of all ranks over the reported steps; None: unknown."""
        values = [value for _, value in self.series.get("samples_per_s", [])]
        return median(values) if values else None

    @property
    def samples_per_s_per_rank(self) -> float | None:
        """Median throughput per rank; None: unknown."""
        return self.samples_per_s / self.num_ranks if self.samples_per_s and self.num_ranks else None

    @property
    def rank_times(self) -> Window | None:
        """Sums of the rank times of all windows with the last number of ranks; None: none was reported."""
        windows = self.history.ranks.windows
        return joined(windows) if windows else None

    def seconds_to_loss(self, loss: float) -> float | None:
        """Return the time from the start to the first step with this loss or less; None: no such step."""
        begun = self.history.begun_unix_s
        reached = (time for time, value in self.losses if value is not None and value <= loss)
        first = next(reached, None)
        return None if first is None or begun is None else first - begun

    @property
    def changed_fields(self) -> dict[str, str]:
        """Fields of the job that differ from the defaults."""
        return {name: value for name, value in self.job.items() if _defaults().get(name) != value}


def records_of(names: Sequence[str]) -> list[RunRecord]:
    """Read the runs that arguments specify: folders of runs, of jobs or of several jobs, or job IDs.

    Raises:
        UserError: An argument specifies no run, or there are more than ``MAX_RUNS`` runs.
    """
    folders: list[Path] = []
    for name, place in zip(names, places_of(names), strict=True):
        found = sorted(set(folders_of_runs(place)))
        if not found:
            raise UserError(f"{name} contains no run", hint="name a run folder, such as runs/JOB/RUN")
        folders += [folder for folder in found if folder not in folders]
    if len(folders) > MAX_RUNS:
        raise UserError(
            f"{len(folders)} runs found; a report contains at most {MAX_RUNS}", hint="name single runs"
        )
    return [read_run(folder) for folder in folders]


def read_run(folder: Path) -> RunRecord:
    """Read a run from its folder."""
    run = Run(folder, with_ranks=False)
    history = History()
    records = list(parsed(_lines(folder)))
    for record in records:
        history.add(record)
    return RunRecord(
        name=run.key,
        status=run.status(),
        history=history,
        series=series_of(record.event for record in records),
        losses=[(time, event.loss) for time, event in _events_of(Progress, records)],
        checkpoints=_events_of(CheckpointWritten, records),
        attempts=[attempt for _, attempt in _events_of(Attempt, records)],
        package_version=next((event.package_version for _, event in _events_of(Opened, records[::-1])), ""),
        end_unix_s=records[-1].time_unix_s if records else None,
        job=_fields_of_job(folder),
    )


def _events_of(kind: type[Kind], records: Sequence[Record]) -> list[tuple[float, Kind]]:
    return [(each.time_unix_s, each.event) for each in records if isinstance(each.event, kind)]


def _lines(folder: Path) -> list[str]:
    """Return the lines of the events file; none if it cannot be read."""
    try:
        with open_regular(folder / EVENTS_FILE) as file:
            return file.read(MAX_READ_BYTES).decode("utf-8", errors="replace").split("\n")
    except OSError:
        return []


def _fields_of_job(folder: Path) -> dict[str, str]:
    """Return the fields of ``job.json`` as text; none if it cannot be read."""
    try:
        with open_regular(folder / "job.json") as file:
            return _as_text(json.loads(file.read(MAX_READ_BYTES)))
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _as_text(tree: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in flat(tree)}


@cache
def _defaults() -> dict[str, str]:
    return _as_text(Job(name="job", task="task").model_dump(mode="json"))
