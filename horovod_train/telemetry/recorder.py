"""Prometheus metrics of one rank.

Recording a step takes a few microseconds, because steps are buffered, and metrics are updated for many steps
at a time or on a scrape. An update after each step would take several times as long, because the step has
evicted the data of the metrics from the CPU caches.
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

UPDATE_METHODS = {"counter": "inc", "gauge": "set", "clock": "set_function", "histogram": "observe"}
MAX_DEFERRED = 64
"""Maximum number of buffered records."""

Sampler = Callable[[], object | None]
"""Called on each scrape; returns a record for the metrics of the catalog, or None."""


class Recorder:
    """Recorder of the metrics of one rank, with its own registry."""

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
        # Finding the time series of a label set takes longer than updating it.
        self._take = cache(self._update_method)
        self.record(WorldRecord(num_wanted=world_size_wanted, num_present=world.size))
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
