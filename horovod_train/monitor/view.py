"""Data of the web page as JSON, computed from runs.

    DisplayedRun, ScrapedRun   runs to display: those in run folders, and those whose ranks are scraped
    Board                      all runs to display, with a background thread that scrapes their ranks
    job_row, run_document, curves_document
                               the list of jobs, one run, and curves of a run

Of a scraped run, only metrics endpoints are known.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, time
from typing import Protocol

import numpy as np

from horovod_train.config.support import TrackerSupport, tracker_support
from horovod_train.errors import UserError, result_of
from horovod_train.events.types import PHASES, Target
from horovod_train.events.wire import parse_line
from horovod_train.launch.base import JobStatus
from horovod_train.monitor.history import History, Point, as_json
from horovod_train.monitor.live import (
    MIN_WINDOW_S,
    NUM_THREADS,
    TIMEOUT_S,
    Access,
    RankReading,
    RankSeries,
    Window,
    access_of,
    by_rank,
    finite,
    joined,
    numbers_in,
    scrape_all,
    stragglers,
    targets_of,
    window_between,
)
from horovod_train.monitor.runs import Run, Runs
from horovod_train.registry import TRACKERS
from horovod_train.system.files import open_regular, read_regular
from horovod_train.telemetry.catalog import SHOWN_NUMBERS

log = logging.getLogger(__name__)

SCRAPE_INTERVAL_S = 2.0
SCRAPE_DUTY_DIVISOR = 5
"""Scraping takes at most 1 / this number of the time, because a scrape of a thousand ranks takes seconds."""

SCRAPE_AFTER_REQUEST_S = 30.0
"""The ranks of a run in a folder are scraped for this time after the last page request for it."""


class DisplayedRun(Protocol):
    """A run that the page can show."""

    @property
    def key(self) -> str:
        """Identifier of the run in URLs."""
        ...

    @property
    def job(self) -> str:
        """Name of the job."""
        ...

    @property
    def run_id(self) -> str:
        """Name of the run."""
        ...

    @property
    def log_dir(self) -> Path | None:
        """Run folder; None if it is not on this host."""
        ...

    def history(self) -> History:
        """Return the history."""
        ...

    def status(self) -> JobStatus:
        """Return the status."""
        ...


@dataclass
class Readings:
    """Metrics from the last scrape of a run's ranks.

    Attributes:
        of_ranks: Metrics by rank, from successful scrapes.
        scraped: Ranks that were scraped, successfully or not.
        time_unix_s: Time of the scrape, in Unix seconds.
        time_s: Time of the scrape, by the monotonic clock.
        last: Metrics from the last successful scrape of each rank, of any age.
    """

    of_ranks: dict[int, RankReading] = field(default_factory=dict)
    scraped: set[int] = field(default_factory=set)
    time_unix_s: float = 0.0
    time_s: float = 0.0
    last: dict[int, RankReading] = field(default_factory=dict)

    @property
    def silent(self) -> set[int]:
        """Ranks whose scrape failed."""
        return self.scraped - self.of_ranks.keys()


class ScrapedRun:
    """Run of which only metrics endpoints are known."""

    log_dir: Path | None = None

    def __init__(self, job: str, run_id: str) -> None:
        self.job, self.run_id = job, run_id
        self.named = job, run_id
        """Job and run in the labels of the targets. The labels of the metrics may differ."""
        self.key = f"{job}/{run_id}"
        self._history = History()
        self._num_up = 0
        self._num_scraped = 0

    def history(self) -> History:
        """Return the history collected by scrapes."""
        return self._history

    def status(self) -> JobStatus:
        """Return the status, which depends on whether any rank can be scraped."""
        if not self._num_scraped:
            return JobStatus("unknown", message="no targets for this run")
        answers = f"{self._num_up} of {self._num_scraped} ranks up"
        return JobStatus("running" if self._num_up else "unknown", message=answers)

    def take(self, targets: Mapping[int, Target], before: Readings, now: Readings) -> None:
        """Add a scrape to the history. ``before`` contains the readings of the previous scrape."""
        history = self._history
        history.targets = dict(targets)
        self._num_up, self._num_scraped = len(now.of_ranks), len(now.scraped)
        num_ranks = max(targets, default=-1) + 1
        seconds = now.time_s - before.time_s
        window = window_between(before.of_ranks, now.of_ranks, seconds, num_ranks)
        if before.of_ranks and now.of_ranks:
            history.ranks.add(window)
        reading = next(iter(now.of_ranks.values()), None)
        if reading is None:
            return
        self.job = reading.labels.get("training_job", self.job)
        self.run_id = reading.labels.get("run", self.run_id)
        values, older = reading.values, next(iter(before.of_ranks.values()), reading).values
        samples = float(np.nansum(window["samples"]))
        if values.get("steps") != older.get("steps") or not history.points:
            history.add_point(
                Point(
                    now.time_unix_s,
                    int(values.get("step", values.get("steps", 0))),
                    int(values["epoch"]) + 1 if "epoch" in values else None,
                    values.get("loss"),
                    values.get("learning_rate"),
                    samples / seconds if np.isfinite(window["samples"]).any() else None,
                    numbers_in(values),
                )
            )
        if "world_size_desired" in values:
            history.world_size_desired = int(values["world_size_desired"])


class Board:
    """All runs to display, with a background thread that scrapes their ranks.

    Args:
        places: Folders that contain runs.
        sources: Files, URLs or lists of targets.
        access: Credentials for the ranks of the sources.
        with_submitted: Whether to display all jobs that were submitted from this account.
    """

    def __init__(
        self,
        places: Sequence[Path],
        sources: Sequence[str] = (),
        access: Access = Access(),  # noqa: B008
        *,
        with_submitted: bool = False,
    ) -> None:
        self._runs = Runs(places, with_submitted=with_submitted)
        self._sources = sources
        self._access = access
        self._scraped: dict[str, ScrapedRun] = {}
        self._targets: dict[str, list[Target]] = {}
        self._readings: dict[str, Readings] = {}
        self._looked_s: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(NUM_THREADS)
        self._lock = Lock()
        self._over = Event()
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop scraping."""
        self._over.set()
        self._pool.shutdown(wait=False, cancel_futures=True)  # do not wait for pending scrapes
        self._thread.join(TIMEOUT_S)

    @property
    def last_request_s(self) -> float:
        """Time of the last page request for any run, by the monotonic clock."""
        return max([*self._looked_s.values()], default=float("-inf"))

    def runs(self) -> list[DisplayedRun]:
        """Return all runs: first the runs of the sources, then the runs in folders, newest first."""
        with self._lock:
            return [*self._scraped.values(), *self._runs.all()]

    def request_run(self, key: str) -> tuple[DisplayedRun, Readings] | None:
        """Return a run and its last metrics, and scrape its ranks for a while; None: no such run."""
        with self._lock:
            run: DisplayedRun | None = self._scraped.get(key) or self._runs.find(key)
            if run is None:
                return None
            self._looked_s[key] = monotonic()
            return run, self._readings.get(key, Readings())

    def _work(self) -> None:
        while True:
            begun_s = monotonic()
            _, error = result_of(self._scrape_all)
            if error is not None:
                if self._over.is_set():
                    return
                log.error("ranks could not be scraped", exc_info=error)
            took_s = monotonic() - begun_s
            if self._over.wait(max(SCRAPE_INTERVAL_S - took_s, took_s * (SCRAPE_DUTY_DIVISOR - 1))):
                return

    def _scrape_all(self) -> None:
        self._scrape_sources()
        self._scrape_runs()

    def _scrape_sources(self) -> None:
        """Scrape the ranks of all sources, grouped by run."""
        groups: dict[tuple[str, str], list[Target]] = {}
        for source in self._sources:
            with suppress(UserError):  # service discovery may be temporarily unavailable
                self._targets[source] = targets_of(source) or []
            found = self._targets.get(source, [])
            for target in found:
                names = target.labels.get("training_job", "job"), target.labels.get("run", source)
                groups.setdefault(names, []).append(target)
        for run in self._scraped.values():
            groups.setdefault(run.named, [])  # it has no targets any more
        for named, targets in groups.items():
            run = self._scraped.get("/".join(named)) or ScrapedRun(*named)
            ranks = by_rank(targets)
            before, now = self._scrape(run.key, ranks, self._access)
            with self._lock:
                run.take(ranks, before, now)
                self._scraped[run.key] = run

    def _scrape_runs(self) -> None:
        """Scrape the ranks of runs in folders that were requested within ``SCRAPE_AFTER_REQUEST_S``."""
        oldest_s = monotonic() - SCRAPE_AFTER_REQUEST_S
        with self._lock:
            keys = [key for key, looked_s in self._looked_s.items() if looked_s > oldest_s]
        for key in keys:
            with self._lock:
                run = self._runs.find(key)
                targets = dict(run.history().targets) if run is not None else {}
                has_ended = run is None or run.status().has_ended
            if run is None or key in self._scraped:
                continue
            if has_ended:
                self._readings[key] = Readings()
            else:
                self._scrape(key, targets, _access_of(run))

    def _scrape(self, key: str, targets: Mapping[int, Target], access: Access) -> tuple[Readings, Readings]:
        """Scrape ranks; return the previous and the new readings."""
        before = self._readings.get(key, Readings())
        addresses = {rank: target.address for rank, target in targets.items()}
        found = scrape_all(addresses, access, self._pool)
        now = Readings(found, set(addresses), time(), monotonic(), {**before.last, **found})
        self._readings[key] = now
        return before, now


def _access_of(run: Run) -> Access:
    """Return the credentials for the ranks of a run; without a password if other users can change the run.

    ``job.json`` names the password variable, and ``events.jsonl`` the addresses that receive the password.
    """
    try:
        is_ours = all(map(_belongs_to_us, (run.log_dir, run.log_dir / "job.json")))
        document = json.loads(read_regular(run.log_dir / "job.json"))
        return access_of(document, os.environ if is_ours else {})
    except (OSError, ValueError, AttributeError):
        return Access()


def _belongs_to_us(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


MAX_CELLS = 60_000
"""Maximum cells of the heatmap: for a thousand ranks, sixty windows."""

ABSENT_AFTER_S = 20.0
"""Ranks missing from a collective for this time are reported. Evaluation on one rank may take as long."""

LOG_TAIL_BYTES = 128 * 1024
MAX_EVENTS_SHOWN = 200
MAX_JOB_BYTES = 4 * 2**20
MAX_TRACKERS = 20

Json = dict[str, object]


def job_row(run: DisplayedRun) -> Json:
    """Return a run as a row of the list of jobs."""
    row, error = result_of(lambda: _job_row(run, run.status(), run.history()))
    if row is not None:
        return row
    # An unreadable run must not hide the other runs.
    log.error("%s cannot be shown", run.key, exc_info=error)
    summary = {"state": "unknown", "message": f"the run cannot be displayed: {type(error).__name__}: {error}"}
    nothing = dict.fromkeys(("begun_unix_s", "step", "num_steps"))
    return {"key": run.key, "job": run.job, "run": run.run_id, **summary, **nothing}


def _job_row(run: DisplayedRun, status: JobStatus, history: History) -> Json:
    last = history.last
    return {
        "key": run.key,
        "job": run.job,
        "run": run.run_id,
        "state": status.state,
        "message": status.message,
        "begun_unix_s": history.begun_unix_s,
        "step": last.step if last else None,
        "num_steps": history.num_steps or None,
    }


def run_document(run: DisplayedRun, readings: Readings) -> Json:
    """Return all data that the page shows for a run, with the last scraped metrics of its ranks."""
    status, history = run.status(), run.history()
    started, last = history.started, history.last
    return {
        **_job_row(run, status, history),
        **_curves(history, status),
        "exit_code": status.exit_code,
        "now_unix_s": time(),
        "folder": str(run.log_dir) if run.log_dir else None,
        "trackers": trackers_of(run.log_dir) if run.log_dir else [],
        "checkpoint_path": history.checkpoint_path or None,
        "world_size_desired": history.world_size_desired,
        "world_size_present": started.world_size if started else history.ranks.num_ranks or None,
        "global_batch_size": started.global_batch_size if started else None,
        "precision": started.precision if started else None,
        "device": started.device if started else None,
        "num_parameters": started.num_parameters if started else None,
        "num_attempts": history.num_attempts,
        "num_preemptions": history.num_preemptions,
        "loss": finite_or_none(last.loss) if last else None,
        "loss_is_finite": last is None or last.loss is None or math.isfinite(last.loss),
        "loss_is_local": history.loss_is_local,
        "lr": finite_or_none(last.lr) if last else None,
        "samples_per_s": finite_or_none(last.samples_per_s) if last else None,
        "epochs_begun": last.epochs_begun if last else None,
        "metrics": {name: finite_or_none(value) for name, value in history.metrics.items()},
        "checkpoint_unix_s": history.checkpoint_unix_s,
        "heat": _heat(history.ranks),
        "ranks": _rank_table(history, readings, status),
        "findings": _findings(history.ranks),
        "last_step_unix_s": last.time_unix_s if last else None,
        "missing_ranks": _absent_ranks(readings),
        "checkpoint_error": history.checkpoint_error,
        "min_window_s": MIN_WINDOW_S,
        "events": [as_json(record) for record in list(history.events)[-MAX_EVENTS_SHOWN:]],
    }


def curves_document(run: DisplayedRun) -> Json:
    """Return the curves of a run, for comparison with another run."""
    history, status = run.history(), run.status()
    return {**_job_row(run, status, history), **_curves(history, status)}


def _curves(history: History, status: JobStatus) -> Json:
    return {
        "points": _points(history),
        "evaluations": _evaluations(history),
        "num_epochs": history.num_epochs or None,
        "has_ended": status.has_ended,
    }


def trackers_of(log_dir: Path) -> list[Json]:
    """Return name and place of each tracker of a run, from its ``job.json``, which is not trusted."""
    try:
        with open_regular(log_dir / "job.json") as file:
            document = json.loads(file.read(MAX_JOB_BYTES))
        sections = document["metrics"]["trackers"]
        found = [(str(each["name"]), dict(each.get("args") or {})) for each in sections[:MAX_TRACKERS]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [{"name": name, "place": _place(name, log_dir.parent, args)} for name, args in found]


def _place(name: str, folder: Path, args: Json) -> str:
    # The file is not trusted: nothing that it names is imported, but for rows of the registry.
    support = tracker_support(name) if name in TRACKERS.rows else TrackerSupport()
    return support.place(folder, args)


def finite_or_none(value: float | None) -> float | None:
    """Return a number; None if it is unknown, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def _points(history: History) -> Json:
    points = history.points
    return {
        "time_unix_s": [point.time_unix_s for point in points],
        "step": [point.step for point in points],
        "loss": [finite_or_none(point.loss) for point in points],
        "lr": [finite_or_none(point.lr) for point in points],
        "samples_per_s": [finite_or_none(point.samples_per_s) for point in points],
        "numbers": {
            SHOWN_NUMBERS[name].shown: [finite_or_none(point.numbers.get(name)) for point in points]
            for name in SHOWN_NUMBERS
            if any(name in point.numbers for point in points)
        },
    }


def _evaluations(history: History) -> Json:
    """Return the metrics of each evaluation by time and step, as one list per metric."""
    names = sorted({name for *_, metrics in history.evaluations for name in metrics})
    return {
        "time_unix_s": [time_unix_s for time_unix_s, *_ in history.evaluations],
        "step": [step for _, step, _ in history.evaluations],
        "metrics": {
            name: [finite_or_none(metrics.get(name)) for *_, metrics in history.evaluations] for name in names
        },
    }


def _heat(series: RankSeries) -> Json:
    """Return own time per step in seconds (or step time if it is unknown), by rank and window."""
    windows = series.windows
    num_ranks = max((window.table.shape[1] for window in windows), default=0)
    columns = max(1, MAX_CELLS // max(1, num_ranks))
    per_column = math.ceil(len(windows) / columns) if windows else 1
    windows = [joined(windows[at : at + per_column]) for at in range(0, len(windows), per_column)]
    is_own = any(np.isfinite(window.own_s).any() for window in windows)
    matrix = np.full((num_ranks, len(windows)), np.nan, np.float32)
    for place, window in enumerate(windows):
        time_s = window.own_s if is_own else window["step_s"]
        matrix[: len(time_s), place] = window.per_step(time_s)
    return {
        "begun_unix_s": round(windows[0].end_unix_s - windows[0].seconds, 1) if windows else None,
        "time_unix_s": [round(window.end_unix_s, 1) for window in windows],
        "is_own": is_own,
        "rows": [finite(row) for row in matrix],
    }


def _rank_table(history: History, readings: Readings, status: JobStatus) -> Json:
    """Return the table of ranks, as one list per column."""
    window = history.ranks.recent(MIN_WINDOW_S)
    known = [*readings.scraped, *history.targets, *range(history.ranks.num_ranks)]
    num_ranks = max(known, default=-1) + 1
    columns: Json = {
        "rank": list(range(num_ranks)),
        "host": [_host(history, readings, rank) for rank in range(num_ranks)],
        "state": [_state(history, readings, rank, status) for rank in range(num_ranks)],
    }
    if window is not None:
        columns |= _times(window, num_ranks)
    names = sorted({name for reading in readings.last.values() for name in reading.values})
    for name in names:
        if name not in PHASES:
            columns[f"now_{name}"] = [
                finite_or_none(readings.last[rank].values.get(name, math.nan))
                if rank in readings.last
                else None
                for rank in range(num_ranks)
            ]
    return columns


def _times(window: Window, num_ranks: int) -> Json:
    """Return own, step and phase times per step in seconds, and waits as fractions of time, by rank."""

    def padded(numbers: np.ndarray) -> list[float | None]:
        return [*finite(numbers), *([None] * (num_ranks - len(numbers)))][:num_ranks]

    waiting, waited_for = window.wait_times
    phases = {phase: window.per_step(window[phase]) for phase in PHASES}
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "window_s": round(window.seconds, 1),
            "own_s": padded(window.per_step(window.own_s)),
            "step_s": padded(window.per_step(window["step_s"])),
            "waiting": padded(waiting / window.seconds),
            "waited_for": padded(waited_for / window.seconds),
            "samples_per_s": padded(window["samples"] / window.seconds),
            "phases_s": {phase: padded(each) for phase, each in phases.items() if np.isfinite(each).any()},
        }


def _host(history: History, readings: Readings, rank: int) -> str:
    target, reading = history.targets.get(rank), readings.last.get(rank)
    labels = reading.labels if reading is not None and reading.labels else target.labels if target else {}
    return labels.get("host", "")


def _state(history: History, readings: Readings, rank: int, status: JobStatus) -> str:
    """Return the state of a rank: trains, dead, failed, ended; empty: unknown."""
    if any(rank == each and failure.is_cause for each, failure in history.failures):
        return "failed"
    if rank in history.ended:
        return "ended"
    if status.has_ended:
        return "dead" if rank in status.lost_ranks else "ended"
    if history.has_terminal_event:
        return "ended"
    if rank in readings.silent:
        return "dead"
    return "trains" if rank in readings.of_ranks else ""


def _absent_ranks(readings: Readings) -> Json | None:
    """Return the ranks missing from a collective for at least ``ABSENT_AFTER_S``; None: none is missing."""
    waiting = {rank: reading.values.get("waiting_now_seconds") for rank, reading in readings.of_ranks.items()}
    known = {rank: seconds for rank, seconds in waiting.items() if seconds is not None}
    longest_s = max(known.values(), default=0.0)
    if longest_s < ABSENT_AFTER_S:
        return None
    # A rank that cannot be scraped is assumed to be missing from the collective.
    absent = {rank for rank, seconds in known.items() if not seconds} | readings.silent
    return {"ranks": sorted(absent), "seconds": longest_s}


def _findings(series: RankSeries) -> list[Json]:
    """Return the slow ranks of the last window; none if it is shorter than ``MIN_WINDOW_S``."""
    window = series.recent(MIN_WINDOW_S)
    if window is None or window.seconds < MIN_WINDOW_S:
        return []
    return [
        {
            "rank": each.rank,
            "own_s": each.own_s,
            "others_s": each.others_s,
            "phase": each.phase,
            "excess_s": each.excess_s,
            "waited_for": finite_or_none(float(window.wait_times[1][each.rank]) / window.seconds),
        }
        for each in stragglers(window)
    ]


def log_tail(run: DisplayedRun) -> str:
    """Return the end of a run's log, with events as readable text; empty if no log is on this host."""
    if run.log_dir is None:
        return ""
    try:
        with open_regular(run.log_dir / "run.log") as file:
            size_bytes = file.seek(0, 2)
            file.seek(max(0, size_bytes - LOG_TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    whole = text if size_bytes <= LOG_TAIL_BYTES else text.partition("\n")[2]
    readable = (parse_line(line).readable() for line in whole.splitlines())
    return "\n".join(line for line in readable if line is not None)
