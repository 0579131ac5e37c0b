"""Runs in folders: their location, status and history, and metrics of jobs.

    Run, Runs                      a run in a run folder, and all runs in some folders
    folders_of_runs, places_of     run folders below a folder, and folders that arguments specify
    JobCollector, JobReading       metrics of jobs, such as state and restarts, from their run folders

Run folders may be one or two levels below the folder that an argument names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from horovod_train.errors import HorovodTrainError, UserError, did_you_mean
from horovod_train.events.file import EVENTS_FILE
from horovod_train.launch.base import JobStatus
from horovod_train.launch.jobs import STATE_FILE, StateFile, find_job, known_jobs
from horovod_train.monitor.history import History, HistoryReader
from horovod_train.telemetry.catalog import JOB_LABELS, Metric

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
    def is_display_only(self) -> bool:
        """Whether the run has no launcher."""
        return not (self.log_dir / STATE_FILE).exists()

    def history(self) -> History:
        """Return the history, including new events."""
        return self._reader.update()

    def status(self) -> JobStatus:
        """Return the status: from the state file, or from the events of a run without launcher."""
        if not self.is_display_only:
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


RECENT_S = 3600.0
"""Earlier runs of a job are exported until this time after their last change: alerts use past samples."""

ENDED_FOR_S = 7 * 24 * 3600.0
"""The newest run of a job is exported until this time after its end."""

MAX_JOBS = 1000


@dataclass(frozen=True)
class JobReading:
    """Current state of a run. ``ended_unix_s`` is None while the run has not ended."""

    status: JobStatus
    history: History
    begun_unix_s: float
    ended_unix_s: float | None


def _present(reading: JobReading) -> int:
    started = reading.history.started
    return (
        started.world_size if started is not None and reading.status.state in ("running", "stopping") else 0
    )


def _failed(reading: JobReading) -> Mapping[str, int]:
    """Return 1 for the cause of a failure, as reported by the ranks or else by the launcher."""
    cause = reading.history.cause or reading.status.cause or "lost"
    return {cause: 1} if reading.status.state == "failed" else {}


JOB_CATALOG = (
    Metric(
        "horovod_train_job_state",
        "gauge",
        "1 for the current state of the job: queued, starting, running, stopping, succeeded, failed, "
        "preempted, cancelled, unknown.",
        "What is the state of the job?",
        JobReading,
        lambda job: {job.status.state: 1},
        label="state",
    ),
    Metric(
        "horovod_train_job_failed",
        "gauge",
        "1 if the job has failed, by cause: configuration, task, not_finite, replicas_differ, checkpoint, "
        "engine, world, nccl, gpu, out_of_memory, lost, other.",
        "Why did the job fail?",
        JobReading,
        _failed,
        label="cause",
    ),
    Metric(
        "horovod_train_job_desired_ranks",
        "gauge",
        "Ranks that the job requested.",
        "Are all requested ranks running?",
        JobReading,
        lambda job: job.history.world_size_desired,
    ),
    Metric(
        "horovod_train_job_present_ranks",
        "gauge",
        "Ranks that train; 0 if none.",
        "Are all requested ranks running?",
        JobReading,
        _present,
    ),
    Metric(
        "horovod_train_job_restarts_total",
        "counter",
        "Restarts of the run's ranks.",
        "Does the job restart repeatedly?",
        JobReading,
        lambda job: max(0, job.history.num_attempts - 1),
    ),
    Metric(
        "horovod_train_job_preemptions_total",
        "counter",
        "Preemptions of the run's ranks.",
        "How often is the job preempted?",
        JobReading,
        lambda job: job.history.num_preemptions,
    ),
    Metric(
        "horovod_train_job_lost_hosts_total",
        "counter",
        "Hosts lost in the run, counted each time.",
        "Do hosts fail?",
        JobReading,
        lambda job: len(job.history.hosts_lost),
    ),
    Metric(
        "horovod_train_job_events_total",
        "counter",
        "Events of the run by kind, as in its events.jsonl.",
        "What happens in the job?",
        JobReading,
        lambda job: dict(job.history.counts),
        label="kind",
    ),
    Metric(
        "horovod_train_job_start_time_seconds",
        "gauge",
        "Start time of the run.",
        "How long does the job run?",
        JobReading,
        lambda job: job.begun_unix_s,
    ),
    Metric(
        "horovod_train_job_ended_timestamp_seconds",
        "gauge",
        "Completion time of the run. Absent while it runs.",
        "When did the job end?",
        JobReading,
        lambda job: job.ended_unix_s,
    ),
)


def reportable_runs(runs: Iterable[Run]) -> Iterator[tuple[Run, JobReading]]:
    """Yield the runs to export, with their state. ``runs`` must be sorted by time, newest first."""
    seen: set[str] = set()
    for run in runs:
        changed_s = run.changed_unix_s()
        if len(seen) >= MAX_JOBS or (run.job in seen and time() - changed_s > RECENT_S):
            continue
        status = run.status()
        ended_s = changed_s if status.has_ended else None
        if ended_s is None or time() - ended_s < (RECENT_S if run.job in seen else ENDED_FOR_S):
            seen.add(run.job)
            history = run.history()
            begun_s = history.begun_unix_s
            yield run, JobReading(status, history, begun_s if begun_s is not None else time(), ended_s)


class JobCollector(Collector):
    """Collector that reads the state of jobs on each scrape.

    Ranks cannot export these metrics, because a failed job has no running ranks. ``horovod-train targets
    serve`` exports them for the newest run of each job, and for earlier runs that changed within
    ``RECENT_S``.
    """

    def __init__(self, runs: Runs, metrics: tuple[Metric, ...] = JOB_CATALOG) -> None:
        self._runs = runs
        self._metrics = metrics

    def describe(self) -> Iterable[Family]:
        """Return no families, so that no names are registered in advance."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield the metric families of all jobs."""
        readings = list(reportable_runs(self._runs.all()))
        for metric in self._metrics:
            labels = [*JOB_LABELS, *([metric.label] if metric.label else [])]
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=labels)
            for run, reading in readings:
                value = metric.value(reading)
                found = value if isinstance(value, Mapping) else {None: value}
                for label, number in found.items():
                    if number is not None:
                        given = [run.job, run.run_id, *([label] if label is not None else [])]
                        family.add_metric(given, float(number))
            yield family
