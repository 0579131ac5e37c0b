"""Metrics of a rank: recorder, samplers, exporter, and export of the last metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import Lock, Thread
from time import monotonic, time
from typing import Protocol

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.log import Waiting
from horovod_train.config.schema import Job, Metrics
from horovod_train.errors import UserError
from horovod_train.events.types import Target
from horovod_train.telemetry.baseline import baseline_samples_per_s
from horovod_train.telemetry.catalog import CATALOG
from horovod_train.telemetry.ending import push_last_metrics, write_last_metrics
from horovod_train.telemetry.exporter import Exporter, Protection
from horovod_train.telemetry.metric import Metric
from horovod_train.telemetry.peaks import peak_flops
from horovod_train.telemetry.recorder import Recorder
from horovod_train.telemetry.records import (
    CurrentWaitRecord,
    DeviceMemoryRecord,
    EndRecord,
    ExchangeRecord,
    GpuExchangeRecord,
    ReferenceRecord,
)
from horovod_train.telemetry.samplers.nvml import gpu_sampler
from horovod_train.telemetry.samplers.process import read_memory

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
