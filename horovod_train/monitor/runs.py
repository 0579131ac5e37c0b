"""The runs that lie in folders: where they are, how they stand, what has happened in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import time

from horovod_train.errors import HorovodTrainError, UserError, did_you_mean
from horovod_train.events.file import EVENTS_FILE
from horovod_train.launch.base import JobStatus
from horovod_train.launch.jobs import STATE_FILE, StateFile, find_job
from horovod_train.monitor.history import History, HistoryReader

SILENT_S = 900.0
"""A run without launcher is considered ended after this time without an event.

Longer than ``health.stall_shutdown_s`` as it is by default, and than most evaluations.
"""

CHECKPOINTS = "checkpoints"
MAX_RUNS = 1000
"""So many runs are looked at, the newest ones: a folder may hold years of them."""


class Run:
    """One run.

    Args:
        log_dir: Its folder.
        with_ranks: Know where the time of each rank went.
    """

    def __init__(self, log_dir: Path, *, with_ranks: bool = True) -> None:
        self.log_dir = log_dir
        self._reader = HistoryReader(log_dir, with_ranks=with_ranks)
        self._state = StateFile(log_dir)

    @property
    def job(self) -> str:
        """Name of its job."""
        return _text(self.log_dir.parent.name)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return _text(self.log_dir.name)

    @property
    def key(self) -> str:
        """What it is called in addresses."""
        return f"{self.job}/{self.run_id}"

    @property
    def is_by_hand(self) -> bool:
        """Whether the run has no launcher."""
        return not (self.log_dir / STATE_FILE).exists()

    def history(self) -> History:
        """Return what has happened in it so far."""
        return self._reader.read_on()

    def status(self) -> JobStatus:
        """Return how it stands."""
        if not self.is_by_hand:
            # Of a run of another host, its own word is all there is.
            return self._state.read()
        history = self.history()
        if history.summary is not None or history.scripts_ended:
            return JobStatus("succeeded", 0)
        if history.failures:
            _, failure = history.failures[0]
            return JobStatus("failed", failure.exit_code, failure.message)
        if history.has_terminal_event:
            return JobStatus("preempted", 75)
        if time() - self.changed_unix_s() > SILENT_S:
            return JobStatus("failed", 137, f"its rank 0 has said nothing for {SILENT_S:.0f} s")
        return JobStatus("running", message="launched without horovod-train run")

    def changed_unix_s(self) -> float:
        """Return when something was noted of it last."""
        return _changed_s(self.log_dir)


class Runs:
    """All runs below some folders.

    Args:
        places: Folders of runs, of a job, or of one run.
        with_ranks: Know where the time of each rank went: of a thousand runs that is gigabytes.
    """

    def __init__(self, places: Sequence[Path], *, with_ranks: bool = True) -> None:
        self._places = places
        self._with_ranks = with_ranks
        self._known: dict[Path, Run] = {}

    def all(self) -> list[Run]:
        """Return the runs there are now, the newest first."""
        found: dict[Path, float] = {}
        for place in self._places:
            for log_dir in folders_of_runs(place):
                found[log_dir] = _changed_s(log_dir)
        newest = sorted(found, key=lambda folder: (-found[folder], str(folder)))[:MAX_RUNS]
        self._known = {
            folder: self._known.get(folder) or Run(folder, with_ranks=self._with_ranks) for folder in newest
        }
        return list(self._known.values())

    def find(self, key: str) -> Run | None:
        """Return the run of a key; None: there is none in the folders."""
        return next((run for run in self.all() if run.key == key), None)


def folders_of_runs(place: Path) -> Iterator[Path]:
    """Yield the folders of runs at a place: of itself, of a job, or of all jobs below it.

    What this account may not look into is left out.
    """
    for pattern in ("", "*", "*/*"):
        for folder in [place] if not pattern else place.glob(pattern):
            with suppress(OSError):
                if folder.parent.name == CHECKPOINTS:  # whose state.json is another file
                    continue
                if any((folder / name).is_file() for name in (EVENTS_FILE, STATE_FILE)):
                    yield folder.resolve()


def _text(name: str) -> str:
    """Return a name of a folder as text, whatever bytes it has."""
    return name.encode("utf-8", errors="replace").decode()


def places_of(names: Sequence[str]) -> list[Path]:
    """Return the folders that a person means: a folder, or the id of a job.

    Raises:
        UserError: There is neither.
    """
    found = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            found.append(path)
            continue
        try:
            found.append(find_job(name).log_dir)
        except HorovodTrainError as error:
            near = did_you_mean(path.name, [each.name for each in path.absolute().parent.glob("*/")])
            raise UserError(
                f"{path.absolute()} is not a folder, and {error.message}",
                hint=near
                or "name the folder of a run, of a job or of several (run_dir, as a rule `runs`), "
                "or a job of `horovod-train list --all`",
            ) from error
    return found


def _changed_s(log_dir: Path) -> float:
    times = []
    for name in (EVENTS_FILE, STATE_FILE):
        try:
            times.append(os.stat(log_dir / name).st_mtime)  # noqa: PTH116  (thousands of them)
        except OSError:
            continue
    return max(times, default=0.0)
