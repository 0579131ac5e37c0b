"""What training tells about itself, as Prometheus metrics of one rank.

Recording costs training a few microseconds: steps are buffered, and counted many at a time or when a client
asks. A dozen metrics after each step would cost several times as much, since the step itself has driven what
they need out of the processor's caches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from threading import RLock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric as Family
from prometheus_client.registry import RestrictedRegistry

from horovod_train.collectives.base import Communicator
from horovod_train.errors import result_of
from horovod_train.telemetry.catalog import CATALOG
from horovod_train.telemetry.metric import RANK_LABELS, Metric
from horovod_train.telemetry.records import EndRecord, StepRecord, WorldRecord

log = logging.getLogger(__name__)

TAKES = {"counter": "inc", "gauge": "set", "clock": "set_function", "histogram": "observe"}
MAX_DEFERRED = 64
"""Steps that are buffered at most."""

Sampler = Callable[[], object | None]
"""Reads something on a scrape; returns what feeds metrics, or None: nothing to tell."""


class Recorder:
    """The metrics of one rank, in their own registry.

    Args:
        job: Name of the job.
        run: Name of this run of it.
        world: Gives rank, local rank and host.
        world_size_wanted: Ranks the job asked for.
        metrics: What is recorded.
    """

    def __init__(
        self,
        job: str,
        run: str,
        world: Communicator,
        world_size_wanted: int,
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
        # Looking a child up by labels costs more than using it.
        self._take = cache(self._taker)
        self.record(WorldRecord(num_wanted=world_size_wanted, num_present=world.size))
        self.record(EndRecord(0.0))
        for metric in metrics:
            if metric.kind == "counter" and metric.from_zero:
                self._take(metric.name)  # a rate needs a value before the first event

    def sample(self, sampler: Sampler) -> None:
        """Have something read on a scrape."""
        self.registry.samplers.append(sampler)

    def record(self, source: object) -> None:
        """Record a step, an evaluation, a write, whatever the catalog has a class for; from any thread."""
        self._deferred.append(source)
        if not isinstance(source, StepRecord) or len(self._deferred) >= MAX_DEFERRED:
            self.count()

    def count(self) -> None:
        """Have the metrics say everything that was recorded."""
        with self._counting:  # else of two threads the one with the older loss may set it last
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

    def _taker(self, name: str, *label: str) -> Callable[..., None]:
        """Return what a value is given to."""
        child = self._families[name].labels(*self._rank_labels, *label)
        return getattr(child, TAKES[self._kinds[name]])  # type: ignore[no-any-return]


class SampledRegistry(CollectorRegistry):
    """Samples on a scrape, then collects.

    Args:
        record: Gets the readings.
        count: Has the metrics say what was recorded.
    """

    def __init__(self, record: Callable[[object], None], count: Callable[[], None]) -> None:
        super().__init__()
        self.samplers: list[Sampler] = []
        self._record = record
        self._count = count

    def collect(self) -> Iterable[Family]:
        """Return everything."""
        self._sample()
        return super().collect()

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """Return what gives some of it."""
        self._sample()
        return super().restricted_registry(names)

    def _sample(self) -> None:
        self._count()
        for sampler in list(self.samplers):
            reading, error = result_of(sampler)
            if error is not None:  # a driver that fails costs its own metrics only
                self.samplers.remove(sampler)
                log.warning("a sampler of metrics is removed: %s: %s", type(error).__name__, error)
            if reading is not None:
                self._record(reading)
