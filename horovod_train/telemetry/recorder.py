"""Prometheus metrics of one rank.

    Recorder, SampledRegistry     the metrics of a rank, updated with buffered records and samplers
    open_recorder, serve          recorder and exporter of a rank
    write_last_metrics, push_last_metrics
                                  export of the last metrics
    record_scaling_baseline       baseline of the scaling efficiency: the throughput of a finished run of
                                  the same job on one rank
    attribute_waiting             attribution of waiting to ranks

The last metrics are exported because a job may be shorter than the time between two scrapes.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from statistics import median
from threading import Lock, RLock, Thread
from time import monotonic, time
from typing import Protocol

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, push_to_gateway, write_to_textfile
from prometheus_client.core import Metric as Family
from prometheus_client.registry import RestrictedRegistry

from horovod_train.collectives.base import Communicator, Waiting
from horovod_train.config.schema import Job, Metrics
from horovod_train.errors import UserError, result_of
from horovod_train.events.file import EVENTS_FILE, as_record, read_events
from horovod_train.events.types import Progress, Summary, Target
from horovod_train.telemetry.catalog import (
    CATALOG,
    RANK_LABELS,
    CurrentWaitRecord,
    DeviceMemoryRecord,
    EndRecord,
    ExchangeRecord,
    GpuExchangeRecord,
    Metric,
    ReferenceRecord,
    StepRecord,
    WorldRecord,
)
from horovod_train.telemetry.exporter import Exporter, Protection
from horovod_train.telemetry.samplers import gpu_sampler, peak_flops, read_memory

log = logging.getLogger(__name__)

UPDATE_METHODS = {"counter": "inc", "gauge": "set", "clock": "set_function", "histogram": "observe"}
MAX_DEFERRED = 64
"""Maximum number of buffered records."""

Sampler = Callable[[], object | None]
"""Called on each scrape; returns a record for the metrics of the catalog, or None."""


class Recorder:
    """Recorder of the metrics of one rank, with its own registry.

    Recording a step takes a few microseconds, because steps are buffered, and metrics are updated for many
    steps at a time or on a scrape. An update after each step would take several times as long, because the
    step has evicted the data of the metrics from the CPU caches.
    """

    def __init__(
        self,
        job: str,
        run: str,
        world: Communicator,
        world_size_desired: int,
        metrics: tuple[Metric, ...] = CATALOG,
    ) -> None:
        self.registry = SampledRegistry(self.record, self.count)
        self._deferred: deque[object] = deque()
        self._counting = RLock()
        self._rank_labels = (job, run, str(world.rank), str(world.local_rank), world.host)
        self._families = {metric.name: self._make(metric) for metric in metrics}
        self._fed_by: dict[type, list[Metric]] = {}
        for metric in metrics:
            self._fed_by.setdefault(metric.source, []).append(metric)
        self._kinds = {metric.name: metric.kind for metric in metrics}
        # Finding the time series of a label set takes longer than updating it.
        self._take = cache(self._update_method)
        self.record(WorldRecord(num_wanted=world_size_desired, num_present=world.size))
        self.record(EndRecord(0.0))
        for metric in metrics:
            if metric.kind == "counter" and metric.from_zero:
                self._take(metric.name)  # creates the series at 0, so that rate() sees the first event

    def sample(self, sampler: Sampler) -> None:
        """Register a sampler, which is called on each scrape."""
        self.registry.samplers.append(sampler)

    def record(self, source: object) -> None:
        """Record an instance of a source class of the catalog, such as ``StepRecord``. Thread-safe."""
        self._deferred.append(source)
        if not isinstance(source, StepRecord) or len(self._deferred) >= MAX_DEFERRED:
            self.count()

    def count(self) -> None:
        """Update the metrics with all buffered records."""
        with self._counting:  # another thread could overwrite a gauge with an older value
            while self._deferred:
                self._count(self._deferred.popleft())

    def _count(self, source: object) -> None:
        for metric in self._fed_by.get(type(source), ()):
            value = metric.value(source)
            if value is None:
                continue
            if metric.label is None:
                self._take(metric.name)(value)
            else:
                for label, number in value.items():
                    self._take(metric.name, label)(number)

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        labels = (*RANK_LABELS, *([metric.label] if metric.label else []))
        if metric.kind == "histogram":
            return Histogram(
                metric.name, metric.help, labels, registry=self.registry, buckets=metric.buckets_s
            )
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(metric.name, metric.help, labels, registry=self.registry)

    def _update_method(self, name: str, *label: str) -> Callable[..., None]:
        """Return the update method (inc, set, set_function or observe) of one time series."""
        child = self._families[name].labels(*self._rank_labels, *label)
        return getattr(child, UPDATE_METHODS[self._kinds[name]])  # type: ignore[no-any-return]


class SampledRegistry(CollectorRegistry):
    """Registry that updates metrics with buffered records (``count``) and samplers before it collects."""

    def __init__(self, record: Callable[[object], None], count: Callable[[], None]) -> None:
        super().__init__()
        self.samplers: list[Sampler] = []
        self._record = record
        self._count = count

    def collect(self) -> Iterable[Family]:
        """Update the metrics, and return all metric families."""
        self._sample()
        return super().collect()

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """Update the metrics, and return a registry of the named ones (``name[]`` in a scrape)."""
        self._sample()
        return super().restricted_registry(names)

    def _sample(self) -> None:
        self._count()
        for sampler in list(self.samplers):
            reading, error = result_of(sampler)
            if error is not None:  # only the metrics of this sampler are lost
                self.samplers.remove(sampler)
                log.warning("a metrics sampler failed and was disabled: %s: %s", type(error).__name__, error)
            if reading is not None:
                self._record(reading)


MAX_RUNS = 100
"""Only this many runs are read, the newest ones, because a folder may contain runs of several years."""

MIN_READINGS = 3
TAIL_BYTES = 256 * 1024

_SECTIONS = ("framework", "task", "task_args", "train", "data")
_LENGTH_ONLY = {"epochs", "max_steps", "max_samples", "stop_at_step", "seed"}


def baseline_samples_per_s(job: Job, run_dir: Path) -> float | None:
    """Return the samples per second of the newest finished run of the same job on one rank; None: no run.

    Two jobs are the same if framework, task, task arguments, data section, and training section without
    length and seed are equal. Their names may differ. ``run_dir`` contains the runs of all jobs.
    """
    wanted = _what_takes_time(job.model_dump(mode="json"))
    for log_dir in newest_runs(run_dir):
        try:
            document = json.loads((log_dir / "job.json").read_bytes())
            if _what_takes_time(document) == wanted:
                found = _samples_per_s(log_dir / EVENTS_FILE)
                if found is not None:
                    return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # from another version, or incomplete
    return None


def newest_runs(run_dir: Path) -> list[Path]:
    """Return at most ``MAX_RUNS`` run folders in ``run_dir``, newest first."""
    found = []
    for path in run_dir.glob(f"*/*/{EVENTS_FILE}"):
        try:
            found.append((path.stat().st_mtime, path.parent))
        except OSError:
            continue
    return [folder for _, folder in sorted(found, reverse=True)[:MAX_RUNS]]


def _what_takes_time(document: Mapping[str, object]) -> dict[str, object]:
    chosen = {name: document[name] for name in _SECTIONS}
    train = chosen["train"]
    if isinstance(train, Mapping):
        chosen["train"] = {name: value for name, value in train.items() if name not in _LENGTH_ONLY}
    return chosen


def _summary(path: Path) -> Summary | None:
    """Return the summary of a run, read from the end of the file so that training is not slowed down."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        if f'"{Summary.kind}"' in line:
            with suppress(ValueError, KeyError, TypeError):
                event = as_record(line).event
                if isinstance(event, Summary):
                    return event
    return None


def _samples_per_s(path: Path) -> float | None:
    """Return the throughput of a run; None: it is not complete, or had several ranks."""
    summary = _summary(path)
    if summary is None or summary.world_size != 1:
        return None
    events = (record.event for record in read_events(path))
    readings = [
        event.samples_per_s
        for event in events
        if isinstance(event, Progress) and event.samples_per_s is not None
    ]
    # The summary also includes the time between steps, mainly of evaluations.
    return median(readings) if len(readings) >= MIN_READINGS else summary.samples_per_s


PUSH_TIMEOUT_S = 5.0


def write_last_metrics(registry: CollectorRegistry, path: Path) -> None:
    """Write current metrics atomically, for users and node_exporter. Errors are logged, not raised."""

    def write() -> None:
        write_to_textfile(str(path), registry)
        path.chmod(0o644)  # node_exporter usually runs as another user

    _, error = result_of(write)
    if error is not None:
        log.warning("the last metrics were not written to %s: %s", path, error)


def push_last_metrics(registry: CollectorRegistry, url: str, training_job: str, rank: int) -> None:
    """Push current metrics to a Pushgateway. Errors are logged, not raised."""
    _, error = result_of(
        lambda: push_to_gateway(
            url,
            job="horovod_train",
            grouping_key={"training_job": training_job, "rank": str(rank)},
            registry=registry,
            timeout=PUSH_TIMEOUT_S,
        )
    )
    if error is not None:
        log.warning("the last metrics were not pushed to %s: %s", url, error)


WANTED_VARIABLE = "HOROVOD_TRAIN_RANKS_WANTED"
DeviceMemory = tuple[int, int | None, int]


def open_recorder(
    job: Job, run_id: str, world: Communicator, metrics: tuple[Metric, ...] = CATALOG
) -> Recorder:
    """Return the recorder of a rank, with a sampler of the process's memory."""
    # In elastic jobs, num_ranks is the current number of ranks.
    wanted = os.environ.get(WANTED_VARIABLE) or job.launch.num_ranks or world.size
    recorder = Recorder(job.name, run_id, world, int(wanted), metrics)
    recorder.sample(read_memory)
    return recorder


def serve(job: Job, run_id: str, world: Communicator, recorder: Recorder, stack: ExitStack) -> Target | None:
    """Serve a rank's metrics until the stack is closed, then export the last metrics.

    Returns:
        Target for Prometheus; None: metrics are disabled, or the exporter cannot listen.

    Raises:
        UserError: The environment variable with the password is not set.
    """
    if not job.metrics.enabled:
        return None
    protection = protection_of(job.metrics, os.environ)
    exporter = Exporter(recorder.registry, job.metrics.host, job.metrics.port + world.local_rank, protection)
    _keep_last_metrics(job, run_id, world, recorder, stack)
    stack.callback(exporter.close)  # closed before the export: samplers must not run concurrently
    labels = {
        "training_job": job.name,
        "run": run_id,
        "rank": str(world.rank),
        "local_rank": str(world.local_rank),
        "host": world.host,
    }
    address = exporter.address_from(os.environ.get("HOROVOD_TRAIN_HOST", world.host))
    return None if address is None else Target(address=address, labels=labels)


def protection_of(metrics: Metrics, environ: Mapping[str, str]) -> Protection:
    """Return the TLS and authentication settings of a job's metrics.

    Raises:
        UserError: The environment variable with the password is not set.
    """
    tls, auth = metrics.tls, metrics.basic_auth
    if auth is not None and not environ.get(auth.password_variable):
        raise UserError(
            f"metrics.basic_auth.password_variable: {auth.password_variable} is not set for this rank",
            hint=f"launch.secrets: {{{auth.password_variable}: env:{auth.password_variable}}} passes it on",
        )
    return Protection(
        certificate=_path(tls.certificate) if tls is not None else None,
        key=_path(tls.key) if tls is not None else None,
        client_ca=_path(tls.client_ca) if tls is not None and tls.client_ca is not None else None,
        user=auth.user if auth is not None else None,
        password=environ[auth.password_variable] if auth is not None else "",
    )


def watch_device(job: Job, recorder: Recorder, uuid: str, memory: Callable[[], DeviceMemory | None]) -> None:
    """Read metrics of a rank's device on each scrape, and record its peak FLOP/s.

    Args:
        job: Contains the precision, and optionally the peak FLOP/s of the device.
        recorder: Records the readings.
        uuid: UUID of the GPU; empty: no GPU.
        memory: Returns the allocated, reserved and peak bytes of the framework; None: no device memory.
    """

    def read_device_memory() -> DeviceMemoryRecord | None:
        found = memory()
        return None if found is None else DeviceMemoryRecord(*found)

    recorder.sample(read_device_memory)
    gpu = gpu_sampler(uuid)
    if gpu is not None:
        recorder.sample(gpu)
    known = peak_flops(gpu.name, job.train.precision) if gpu is not None else None
    recorder.record(ReferenceRecord(peak_flops=job.metrics.device_peak_flops or known))


def watch_exchange(
    recorder: Recorder,
    counters: Callable[[], tuple[int, float] | None],
    record: type[ExchangeRecord] = ExchangeRecord,
) -> None:
    """Read Horovod's counters on each scrape.

    Args:
        recorder: Records the increase since the last reading.
        counters: Returns total bytes and seconds; None: Horovod does not count them.
        record: Class of the records.
    """
    before = (0, 0.0)
    reading = Lock()

    def read() -> ExchangeRecord | None:
        nonlocal before
        with reading:
            found = counters()
            if found is None or not found[1]:
                return None
            since = record(found[0] - before[0], found[1] - before[1])
            before = found
            return since

    recorder.sample(read)


def watch_exchanges(recorder: Recorder, ranks: object) -> None:
    """Read the counters of all-reduces on CPUs and on GPUs on each scrape."""
    watch_exchange(recorder, getattr(ranks, "allreduce_counters", lambda: None))
    watch_exchange(recorder, getattr(ranks, "gpu_allreduce_counters", lambda: None), GpuExchangeRecord)


class PendingCollective(Protocol):
    """Object with the current wait of a rank; both values are None if it does not wait, or if unknown."""

    @property
    def waiting_since_s(self) -> float | None:
        """Start of the wait, by ``monotonic``."""
        ...

    @property
    def waiting_in(self) -> Waiting | None:
        """Collective or device work that the rank waits for."""
        ...


def watch_waiting(recorder: Recorder, who: PendingCollective) -> None:
    """Export the duration of the current wait. In a hang, the rank that does not wait is the cause."""

    def read() -> CurrentWaitRecord:
        since_s, entry = who.waiting_since_s, who.waiting_in
        # If its own device has not started the all-reduce, other ranks wait for this rank.
        is_busy = entry is not None and not entry.is_collective
        return CurrentWaitRecord(0.0 if since_s is None or is_busy else monotonic() - since_s)

    recorder.sample(read)


def record_scaling_baseline(job: Job, world: Communicator, recorder: Recorder) -> None:
    """On rank 0 of several, record the throughput of one rank, in a thread: file systems may be slow."""
    if world.rank != 0 or world.size == 1:
        return

    def look() -> None:
        run_dir = Path(job.run_dir).expanduser()
        recorder.record(ReferenceRecord(samples_per_s=baseline_samples_per_s(job, run_dir)))

    Thread(target=look, daemon=True).start()


def _keep_last_metrics(
    job: Job, run_id: str, world: Communicator, recorder: Recorder, stack: ExitStack
) -> None:
    """When the stack is closed, export the last metrics to the run folder and as configured in the job."""
    metrics = job.metrics
    if metrics.push_url is not None:
        stack.callback(push_last_metrics, recorder.registry, metrics.push_url, job.name, world.rank)
    if metrics.textfile_dir is not None:
        file = _path(metrics.textfile_dir) / f"{job.name}-rank-{world.rank}.prom"
        stack.callback(write_last_metrics, recorder.registry, file)
    file = _path(job.run_dir) / job.name / run_id / f"rank-{world.rank}.prom"
    stack.callback(write_last_metrics, recorder.registry, file)
    stack.callback(lambda: recorder.record(EndRecord(time())))  # runs first: callbacks run in reverse order


def _path(name: str) -> Path:
    return Path(name).expanduser()


Floats = npt.NDArray[np.float64]


def times_interval_s(num_ranks: int) -> float:
    """Return the time between two reports of the times of a rank, in seconds.

    It grows with the number of ranks (1,000 ranks: 30 s), which limits the bytes per second.
    """
    return max(2.0, 0.03 * num_ranks)


def attribute_waiting(wait_times_s: Floats) -> tuple[Floats, Floats, Floats]:
    """Return waiting, waited for, and communication.

    The attribution uses the time that each rank waited in the all-reduce of a step. Clocks of hosts are not
    compared. All ranks exit an all-reduce at the same time, so the rank with the shortest wait arrived
    last, and its wait is the time of the communication. For n ranks with waits w1 <= w2 <= ... <= wn (rank
    1 arrived last):

        communication        w1
        waiting of rank i    wi - w1
        waited for           between the arrivals of ranks i + 1 and i, n - i ranks waited for i missing
                             ranks; each missing rank is charged with (n - i) (w[i+1] - wi) / i

    The sum of the charges is that of the waiting.

    Args:
        wait_times_s: Wait of each rank in the all-reduce of each step, shape [steps, ranks].

    Returns:
        Time that each rank waited for others, summed over steps, shape [ranks]; time that others waited for
        it, summed over steps and other ranks, shape [ranks]; time of the communication, shape [steps].

    >>> waiting, waited_for, communication = attribute_waiting(np.array([[3.0, 1.0, 3.0]]))
    >>> waiting.tolist(), waited_for.tolist(), communication.tolist()
    ([2.0, 0.0, 2.0], [0.0, 4.0, 0.0], [1.0])
    """
    num_steps, num_ranks = wait_times_s.shape
    order = np.argsort(wait_times_s, axis=1, kind="stable")
    ordered = np.take_along_axis(wait_times_s, order, axis=1)
    communication = ordered[:, 0] if num_ranks else np.zeros(num_steps)
    missing = np.arange(1, num_ranks)
    charged = np.zeros_like(wait_times_s)
    charges = np.diff(ordered, axis=1) * ((num_ranks - missing) / missing)
    # A rank is charged for all intervals in which it is missing.
    charged[:, :-1] = np.cumsum(charges[:, ::-1], axis=1)[:, ::-1]
    waited_for = np.zeros_like(wait_times_s)
    np.put_along_axis(waited_for, order, charged, axis=1)
    return (wait_times_s - communication[:, None]).sum(0), waited_for.sum(0), communication
