"""Metrics of whole jobs, from the folders of their runs: how they stand, and how often they began again.

Ranks cannot tell these: a job that has failed has no ranks any more. ``horovod-train targets serve`` shows
them for the newest run of each job.
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
"""Time for which ended runs are reported: alerts look back, and a job may have been restarted."""

ENDED_FOR_S = 7 * 24 * 3600.0
"""A job that ended longer ago is not shown any more."""

MAX_JOBS = 1000


@dataclass(frozen=True)
class JobReading:
    """A run of a job, as it is now.

    Attributes:
        status: How it stands.
        history: What has happened in it.
        begun_unix_s: When it began.
        ended_unix_s: When it ended; None: it has not.
    """

    status: JobStatus
    history: History
    begun_unix_s: float
    ended_unix_s: float | None


def _present(reading: JobReading) -> int:
    started = reading.history.started
    return started.world_size if started is not None and reading.status.state in ("running", "leaving") else 0


def _failed(reading: JobReading) -> Mapping[str, int]:
    """Return why it has failed: by its ranks' own word, or else by the word of who carried it out."""
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
    """Yield unfinished and recently ended runs with their state; the newest run of each job is kept longer.

    Args:
        runs: Runs, the newest first.
    """
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
    """Reads jobs on a scrape.

    Args:
        runs: Where they lie.
        metrics: What is shown of them.
    """

    def __init__(self, runs: Runs, metrics: tuple[Metric, ...] = JOB_CATALOG) -> None:
        self._runs = runs
        self._metrics = metrics

    def describe(self) -> Iterable[Family]:
        """Return nothing: names are known when jobs are."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield the metrics of all jobs."""
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
