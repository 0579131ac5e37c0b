"""What training tells about itself, as Prometheus metrics of one rank.

Recording costs a few microseconds and never raises into training.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from horovod_train.checkpoint.manager import WriteReport
from horovod_train.collectives.base import Communicator
from horovod_train.telemetry import catalog
from horovod_train.telemetry.catalog import CATALOG, RANK_LABELS, Metric


class Recorder:
    """The metrics of one rank, in a registry of their own.

    Args:
        job: Name of the job.
        run: Name of this run of it.
        world: Gives rank, local rank and host.
        world_size_wanted: Ranks the job asked for.
    """

    def __init__(self, job: str, run: str, world: Communicator, world_size_wanted: int) -> None:
        self.registry = CollectorRegistry()
        self._rank_labels = (job, run, str(world.rank), str(world.local_rank), world.host)
        self._metrics = {metric.name: self._make(metric) for metric in CATALOG}
        # Looking a child up by labels costs more than using it.
        self._child = cache(self._labelled)
        self._child(catalog.WORLD_WANTED).set(world_size_wanted)
        self._child(catalog.WORLD_PRESENT).set(world.size)
        for metric in CATALOG:
            if metric.kind == "counter" and not metric.labels:
                self._child(metric)  # zero from the start: a rate needs a value before the first event

    def record_step(
        self,
        *,
        phase_seconds: Mapping[str, float],
        num_samples: int,
        epochs: float,
        loss: float,
        local_loss: float,
        lr: float,
        grad_norm: float | None,
        bytes_reduced: int,
        is_finite: bool,
    ) -> None:
        """Record one optimizer step."""
        for phase, seconds in phase_seconds.items():
            self._child(catalog.STEP_PHASE, phase).observe(seconds)
        self._child(catalog.STEP).observe(sum(phase_seconds.values()))
        self._child(catalog.STEPS).inc()
        self._child(catalog.SAMPLES).inc(num_samples)
        self._child(catalog.EPOCH).set(epochs)
        self._child(catalog.LOSS).set(loss)
        self._child(catalog.LOCAL_LOSS).set(local_loss)
        self._child(catalog.LEARNING_RATE).set(lr)
        self._child(catalog.BYTES_REDUCED).inc(bytes_reduced)
        if grad_norm is not None:
            self._child(catalog.GRAD_NORM).set(grad_norm)
        if not is_finite:
            self._child(catalog.NON_FINITE).inc()

    def record_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one evaluation."""
        for name, value in metrics.items():
            self._child(catalog.EVALUATION, name).set(value)

    def record_checkpoint(self, report: WriteReport) -> None:
        """Record an attempt to write a checkpoint; may be called from another thread."""
        if report.error:
            self._child(catalog.CHECKPOINT_FAILURES).inc()
            return
        written_s = time.monotonic()
        self._child(catalog.CHECKPOINT_WRITE).observe(report.seconds)
        self._child(catalog.CHECKPOINT_BYTES).set(report.size_bytes)
        self._child(catalog.CHECKPOINT_AGE).set_function(lambda: time.monotonic() - written_s)

    def record_grace_needed(self, seconds: float) -> None:
        """Record how long leaving would take."""
        self._child(catalog.GRACE_NEEDED).set(seconds)

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        labels = (*RANK_LABELS, *metric.labels)
        if metric.kind == "histogram":
            return Histogram(
                metric.name, metric.help, labels, registry=self.registry, buckets=metric.buckets_s
            )
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(metric.name, metric.help, labels, registry=self.registry)

    def _labelled(self, metric: Metric, *values: str) -> Any:
        return self._metrics[metric.name].labels(*self._rank_labels, *values)
