"""Runs to display: runs in run folders, and runs of which only metrics endpoints are known."""

from __future__ import annotations

import json
import logging
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

from horovod_train.errors import UserError, result_of
from horovod_train.events.types import Target
from horovod_train.launch.base import JobStatus
from horovod_train.monitor.history import History, Point
from horovod_train.monitor.live import (
    NUM_THREADS,
    TIMEOUT_S,
    Access,
    RankReading,
    access_of,
    by_rank,
    numbers_in,
    scrape_all,
    targets_of,
    window_between,
)
from horovod_train.monitor.runs import Run, Runs
from horovod_train.system.files import read_regular

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
        if "world_size_wanted" in values:
            history.world_size_wanted = int(values["world_size_wanted"])


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
