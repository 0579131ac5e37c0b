"""Metrics of jobs, such as state and restarts, from their run folders.

Ranks cannot export them, because a failed job has no running ranks. ``horovod-train targets serve`` exports
them for the newest run of each job, and for earlier runs that changed within ``RECENT_S``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import time

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from horovod_train.launch.base import JobStatus
from horovod_train.monitor.history import History
from horovod_train.monitor.runs import Run, Runs
from horovod_train.telemetry.metric import JOB_LABELS, Metric

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
    return started.world_size if started is not None and reading.status.state in ("running", "leaving") else 0


def _failed(reading: JobReading) -> Mapping[str, int]:
    """Return 1 for the cause of a failure, as reported by the ranks or else by the launcher."""
    cause = reading.history.cause or reading.status.cause or "lost"
    return {cause: 1} if reading.status.state == "failed" else {}


JOB_CATALOG = (
    Metric(
        "horovod_train_job_state",
        "gauge",
        "1 for the current state of the job: waiting, starting, running, leaving, succeeded, failed, "
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
        "horovod_train_job_wanted_ranks",
        "gauge",
        "Ranks that the job requested.",
        "Are all requested ranks running?",
        JobReading,
        lambda job: job.history.world_size_wanted,
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
        "horovod_train_job_begun_timestamp_seconds",
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
    """Collector that reads the state of jobs on each scrape."""

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
