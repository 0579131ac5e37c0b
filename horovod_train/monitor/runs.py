"""Runs in folders: their location, status and history."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import time

from horovod_train.errors import HorovodTrainError, UserError, did_you_mean
from horovod_train.events.file import EVENTS_FILE
from horovod_train.launch.base import JobStatus
from horovod_train.launch.jobs import STATE_FILE, StateFile, find_job, known_jobs
from horovod_train.monitor.history import History, HistoryReader

SILENT_S = 900.0
"""A run without launcher counts as failed after this time without an event.

It is longer than the default of ``health.stall_shutdown_s``, and longer than most evaluations.
"""

CHECKPOINTS = "checkpoints"
MAX_RUNS = 1000
"""Only this many runs are shown, the newest ones, because a folder may contain runs of several years."""


class Run:
    """Run in a run folder. ``with_ranks`` includes the times of each rank (``rank_times`` events)."""

    def __init__(self, log_dir: Path, *, with_ranks: bool = True) -> None:
        self.log_dir = log_dir
        self._reader = HistoryReader(log_dir, with_ranks=with_ranks)
        self._state = StateFile(log_dir)

    @property
    def job(self) -> str:
        """Name of the job."""
        return _text(self.log_dir.parent.name)

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return _text(self.log_dir.name)

    @property
    def key(self) -> str:
        """Identifier of the run in URLs."""
        return f"{self.job}/{self.run_id}"

    @property
    def is_by_hand(self) -> bool:
        """Whether the run has no launcher."""
        return not (self.log_dir / STATE_FILE).exists()

    def history(self) -> History:
        """Return the history, including new events."""
        return self._reader.update()

    def status(self) -> JobStatus:
        """Return the status: from the state file, or from the events of a run without launcher."""
        if not self.is_by_hand:
            # The mtime of the file shows whether a launcher on another host is running.
            return self._state.read()
        history = self.history()
        if history.summary is not None or history.scripts_ended:
            return JobStatus("succeeded", 0)
        if history.failures:
            failures = [failure for _, failure in history.failures]
            failure = next((each for each in failures if each.is_cause), failures[0])
            return JobStatus("failed", failure.exit_code, failure.message)
        if history.has_terminal_event:
            return JobStatus("preempted", 75)
        if time() - self.changed_unix_s() > SILENT_S:
            return JobStatus("failed", 137, f"no event from rank 0 for {SILENT_S:.0f} s")
        return JobStatus("running", message="launched without horovod-train run")

    def changed_unix_s(self) -> float:
        """Return the time of the last write of state or events."""
        return _changed_s(self.log_dir)


class Runs:
    """All runs in some folders.

    Args:
        places: Folders of one run, of a job, or of several jobs.
        with_ranks: Whether to read the times of each rank, which need gigabytes for a thousand runs.
        with_submitted: Whether to include the runs of all jobs that were submitted from this account.
    """

    def __init__(
        self, places: Sequence[Path], *, with_ranks: bool = True, with_submitted: bool = False
    ) -> None:
        self._places = places
        self._with_ranks = with_ranks
        self._with_submitted = with_submitted
        self._known: dict[Path, Run] = {}

    def all(self) -> list[Run]:
        """Return the current runs, newest first."""
        found: dict[Path, float] = {}
        submitted = (job.log_dir for job in known_jobs()) if self._with_submitted else ()
        for place in [*self._places, *submitted]:
            for log_dir in folders_of_runs(place):
                found[log_dir] = _changed_s(log_dir)
        newest = sorted(found, key=lambda folder: (-found[folder], str(folder)))[:MAX_RUNS]
        self._known = {
            folder: self._known.get(folder) or Run(folder, with_ranks=self._with_ranks) for folder in newest
        }
        return list(self._known.values())

    def find(self, key: str) -> Run | None:
        """Return the run with a key; None: no such run."""
        return next((run for run in self.all() if run.key == key), None)


def folders_of_runs(place: Path) -> Iterator[Path]:
    """Yield run folders: the folder itself, and folders one or two levels below, if they are readable."""
    for pattern in ("", "*", "*/*"):
        for folder in [place] if not pattern else place.glob(pattern):
            with suppress(OSError):
                if folder.parent.name == CHECKPOINTS:  # state.json of a checkpoint is a different file
                    continue
                if any((folder / name).is_file() for name in (EVENTS_FILE, STATE_FILE)):
                    yield folder.resolve()


def _text(name: str) -> str:
    """Return a folder name as valid UTF-8."""
    return name.encode("utf-8", errors="replace").decode()


def places_of(names: Sequence[str]) -> list[Path]:
    """Return the folders that arguments specify by path or by job ID.

    Raises:
        UserError: An argument is neither a folder nor a job ID.
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
