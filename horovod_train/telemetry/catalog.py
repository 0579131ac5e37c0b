"""Metrics of a rank: name, type, help text, question that it answers, source record, and value.

Recorder, documentation, dashboards, alert rules, web page and tests are derived from ``CATALOG``. Sources
of metrics are the records below, of training and samplers, and ``WriteReport``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from horovod_train.checkpoint.writing import WriteReport

RANK_LABELS = ("training_job", "run", "rank", "local_rank", "host")
"""Labels of a rank's series. The label ``job`` is not used, because Prometheus sets it to the scrape job."""

JOB_LABELS = ("training_job", "run")
"""Labels of the series of a job."""


@dataclass(frozen=True)
class Metric:
    """Metric.

    Attributes:
        name: Name in Prometheus, with the base unit.
        kind: A counter is incremented by the value, a gauge is set to it, and a histogram observes it. A
            clock is a gauge whose value is a function that is called on each scrape.
        help: Help text, one sentence.
        question: Question of a user that the metric answers.
        source: Class of the records from which it is computed.
        value: Returns the value from a record; with ``label``, a mapping from label value to value; None: no
            update.
        label: Additional label; None: only those of the rank.
        buckets_s: Upper bounds of a histogram, in seconds.
        from_zero: Whether a counter is exported as zero before the first record. False: it may be unknown.
        shown: Title on the job's dashboard and on the page, for numbers of a step that are equal on all
            ranks; empty: it has its own panel, or none.
    """

    name: str
    kind: Literal["counter", "gauge", "clock", "histogram"]
    help: str
    question: str
    source: type
    value: Callable[..., Any]
    label: str | None = None
    buckets_s: tuple[float, ...] = ()
    from_zero: bool = True
    shown: str = ""

    @property
    def prometheus_type(self) -> str:
        """Type in Prometheus."""
        return "gauge" if self.kind == "clock" else self.kind


@dataclass(frozen=True)
class StepNumber:
    """``Metric.value`` that returns a number of a step, by its name in ``StepRecord.numbers``."""

    name: str

    def __call__(self, step: Any) -> float | None:
        """Return the number of a step; None: it was not computed."""
        found: float | None = step.numbers.get(self.name)
        return found


def as_markdown(metrics: Iterable[Metric]) -> str:
    """Return a Markdown table of metrics for the documentation."""
    rows = ["| metric | type | meaning | answers |", "|---|---|---|---|"]
    for metric in metrics:
        by = f" by {metric.label}" if metric.label else ""
        rows.append(f"| `{metric.name}`{by} | {metric.prometheus_type} | {metric.help} | {metric.question} |")
    return "\n".join(rows)


@dataclass(slots=True)  # a frozen one takes four times as long to create, in each step
class StepRecord:
    """One optimizer step of this rank. In scripts, values that may be None may be unknown.

    Attributes:
        seconds: Wall time of the step; on a GPU, device time.
        phase_seconds: Time by phase, as far as phases are measured separately.
        num_samples: Samples that this rank read.
        epochs: Epochs passed, with the fraction of the current one.
        loss: Mean loss over the samples of all ranks.
        local_loss: Contribution of this rank to the loss.
        lr: Learning rate.
        is_finite: Whether loss and gradient were finite. If not, the step was skipped. None: not checked.
        own_seconds: Step time minus all-reduce wait; None: not measured separately.
        step: Number of the step, counted over all restarts.
        numbers: Further numbers of the step by name, as in ``StepOutcome``; None: not computed.
    """

    seconds: float
    phase_seconds: Mapping[str, float]
    num_samples: int | None
    epochs: float | None
    loss: float | None
    local_loss: float | None
    lr: float | None
    is_finite: bool | None
    own_seconds: float | None = None
    step: int | None = None
    numbers: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupNoiseRecord:
    """Gradient noise scale of each parameter group in samples, by number of the group."""

    noise_scales: Mapping[str, float]


@dataclass(frozen=True)
class WaitRecord:
    """Waits of this rank in some steps, computed after all ranks have exchanged their wait times.

    Attributes:
        waiting_s: Time that this rank waited for other ranks.
        communication_s: Wait of the rank that arrived last, which is the time of the communication.
        waited_for_s: Time that other ranks waited for this rank, summed over them.
    """

    waiting_s: float
    communication_s: float
    waited_for_s: float


@dataclass(frozen=True)
class CurrentWaitRecord:
    """Time for which this rank has been waiting in its current collective; 0: it does not wait."""

    seconds: float


@dataclass(frozen=True)
class ExchangeRecord:
    """Bytes and duration of all-reduces since the last reading, from the time when all ranks are ready."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class GpuExchangeRecord(ExchangeRecord):
    """The same for all-reduces on a GPU. The duration begins when the data of this rank is ready."""


@dataclass(frozen=True)
class EvaluationRecord:
    """Metrics of one evaluation, over all samples of all ranks."""

    metrics: Mapping[str, float]


@dataclass(frozen=True)
class EvaluatingRecord:
    """Start or end of an evaluation."""

    is_under_way: bool


@dataclass(frozen=True)
class WorldRecord:
    """Number of ranks that the job requested, and number of running ranks."""

    num_wanted: int
    num_present: int


@dataclass(frozen=True)
class EndRecord:
    """End time of this rank, in Unix seconds; 0: the rank is running."""

    unix_s: float


@dataclass(frozen=True)
class GraceRecord:
    """Estimated time of a preemption, and its grace period ``launch.grace_s``."""

    needed_s: float
    granted_s: float


@dataclass(frozen=True)
class TrackerRecord:
    """Calls of trackers that were dropped or failed."""

    num_lost: int


@dataclass(frozen=True)
class ReferenceRecord:
    """Throughput of a run of the same job on one rank, and peak FLOP/s of the device; None: unknown."""

    samples_per_s: float | None = None
    peak_flops: float | None = None


@dataclass(frozen=True)
class MemoryRecord:
    """Resident memory of this process on its host: current and peak."""

    resident_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class DeviceMemoryRecord:
    """Device memory of the framework: allocated by tensors, reserved (None: unknown), peak of allocated."""

    allocated_bytes: int
    reserved_bytes: int | None
    peak_bytes: int


@dataclass(frozen=True)
class GpuRecord:
    """State of this rank's GPU from NVML; None: not supported by the GPU or its driver.

    Attributes:
        utilization: Fraction of time in which a kernel ran, 0 to 1.
        memory_used_bytes: Memory used by all processes.
        memory_total_bytes: Memory of the GPU.
        power_w: Power draw.
        temperature_c: Temperature of the chip.
        clock_hz: Clock of the multiprocessors.
        throttled: 1 for each reason for which the clock is throttled, else 0.
        ecc_errors: New memory errors since the last reading, by kind: corrected, uncorrected.
    """

    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_hz: float | None = None
    throttled: Mapping[str, int] | None = None
    ecc_errors: Mapping[str, int] | None = None


MACHINE = (
    Metric(
        "horovod_train_resident_memory_bytes",
        "gauge",
        "Memory of this process on its host, without loader processes.",
        "Does a rank leak memory?",
        MemoryRecord,
        lambda memory: memory.resident_bytes,
    ),
    Metric(
        "horovod_train_resident_memory_peak_bytes",
        "gauge",
        "Peak memory of this process on its host.",
        "How much memory does a rank need?",
        MemoryRecord,
        lambda memory: memory.peak_bytes,
    ),
    Metric(
        "horovod_train_device_memory_allocated_bytes",
        "gauge",
        "Memory of this rank's device allocated by tensors of its framework.",
        "How much of the device's memory is in use?",
        DeviceMemoryRecord,
        lambda memory: memory.allocated_bytes,
    ),
    Metric(
        "horovod_train_device_memory_reserved_bytes",
        "gauge",
        "Memory of this rank's device reserved by its framework.",
        "How much of the device's memory is in use?",
        DeviceMemoryRecord,
        lambda memory: memory.reserved_bytes,
    ),
    Metric(
        "horovod_train_device_memory_peak_bytes",
        "gauge",
        "Peak memory of this rank's device allocated by tensors of its framework.",
        "Would a larger batch fit?",
        DeviceMemoryRecord,
        lambda memory: memory.peak_bytes,
    ),
    Metric(
        "horovod_train_gpu_utilization_ratio",
        "gauge",
        "Fraction of time in which a kernel ran on this rank's GPU (NVML).",
        "Is the GPU busy?",
        GpuRecord,
        lambda gpu: gpu.utilization,
    ),
    Metric(
        "horovod_train_gpu_memory_used_bytes",
        "gauge",
        "Memory of this rank's GPU used by all processes (NVML).",
        "Do other processes use the GPU?",
        GpuRecord,
        lambda gpu: gpu.memory_used_bytes,
    ),
    Metric(
        "horovod_train_gpu_memory_total_bytes",
        "gauge",
        "Memory of this rank's GPU (NVML).",
        "How much of the device's memory is in use?",
        GpuRecord,
        lambda gpu: gpu.memory_total_bytes,
    ),
    Metric(
        "horovod_train_gpu_power_watts",
        "gauge",
        "Power draw of this rank's GPU (NVML).",
        "Do all GPUs have the same load?",
        GpuRecord,
        lambda gpu: gpu.power_w,
    ),
    Metric(
        "horovod_train_gpu_temperature_celsius",
        "gauge",
        "Temperature of this rank's GPU (NVML).",
        "Is a GPU too hot?",
        GpuRecord,
        lambda gpu: gpu.temperature_c,
    ),
    Metric(
        "horovod_train_gpu_clock_hertz",
        "gauge",
        "Clock of the multiprocessors of this rank's GPU (NVML).",
        "Is a GPU slower than the others?",
        GpuRecord,
        lambda gpu: gpu.clock_hz,
    ),
    Metric(
        "horovod_train_gpu_throttled",
        "gauge",
        "1 if the clock of this rank's GPU is throttled for a reason (NVML), else 0.",
        "Why is a GPU slower than the others?",
        GpuRecord,
        lambda gpu: gpu.throttled,
        label="reason",
    ),
    Metric(
        "horovod_train_gpu_ecc_errors_total",
        "counter",
        "Memory errors of this rank's GPU since the rank started: corrected, uncorrected (NVML).",
        "Is a GPU about to fail?",
        GpuRecord,
        lambda gpu: gpu.ecc_errors,
        label="kind",
        from_zero=False,
    ),
)


STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
CHECKPOINT_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)


def _age(report: WriteReport) -> Callable[[], float] | None:
    """Return a function that returns the age of a checkpoint; None: the checkpoint could not be written."""
    if report.error:
        return None
    written_s = time.monotonic()
    return lambda: time.monotonic() - written_s


STEPS = (
    Metric(
        "horovod_train_step_phase_seconds",
        "histogram",
        "Time of an optimizer step in a phase: data, forward, backward, allreduce_wait, optimizer; compute: "
        "several of these, if a framework does not separate them. On a GPU, device time.",
        "Which phase of a step takes the time?",
        StepRecord,
        lambda step: step.phase_seconds,
        label="phase",
        buckets_s=STEP_BUCKETS_S,
    ),
    Metric(
        "horovod_train_step_seconds",
        "histogram",
        "Wall time of an optimizer step; on a GPU, device time from its first kernel to its last.",
        "How long does a step take?",
        StepRecord,
        lambda step: step.seconds,
        buckets_s=STEP_BUCKETS_S,
    ),
    Metric(
        "horovod_train_own_seconds_total",
        "counter",
        "Own time: step time minus all-reduce wait. Absent if a framework does not separate them.",
        "Which rank is slow? Step times are equal on all ranks; own times are not.",
        StepRecord,
        lambda step: step.own_seconds,
        from_zero=False,
    ),
    Metric(
        "horovod_train_waiting_seconds_total",
        "counter",
        "Time that this rank waited in all-reduce for ranks that arrived later.",
        "How much time does a rank lose to slower ranks?",
        WaitRecord,
        lambda wait: wait.waiting_s,
        from_zero=False,
    ),
    Metric(
        "horovod_train_waited_for_seconds_total",
        "counter",
        "Time that other ranks waited for this rank, summed over them; its rate is the average number of "
        "ranks that wait for this rank.",
        "Which rank do the others wait for?",
        WaitRecord,
        lambda wait: wait.waited_for_s,
        from_zero=False,
    ),
    Metric(
        "horovod_train_communication_seconds_total",
        "counter",
        "All-reduce wait of the rank that arrived last: communication that does not overlap computation.",
        "Does the network make steps slow?",
        WaitRecord,
        lambda wait: wait.communication_s,
        from_zero=False,
    ),
    Metric(
        "horovod_train_waiting_now_seconds",
        "gauge",
        "Time for which this rank has been waiting in its current collective; 0 if it is in none.",
        "Which rank is missing from the collective in which a job hangs?",
        CurrentWaitRecord,
        lambda waiting: waiting.seconds,
    ),
    Metric(
        "horovod_train_steps_total",
        "counter",
        "Optimizer steps of this process.",
        "Does training make progress?",
        StepRecord,
        lambda _: 1,
    ),
    Metric(
        "horovod_train_samples_total",
        "counter",
        "Training samples read by this rank.",
        "What is the throughput of a rank, and of all ranks?",
        StepRecord,
        lambda step: step.num_samples,
    ),
    Metric(
        "horovod_train_step",
        "gauge",
        "Last optimizer step, counted over all restarts. Absent for scripts.",
        "How far is training?",
        StepRecord,
        lambda step: step.step,
    ),
    Metric(
        "horovod_train_epoch",
        "gauge",
        "Epochs passed, with the fraction of the current one.",
        "How far is training?",
        StepRecord,
        lambda step: step.epochs,
    ),
    Metric(
        "horovod_train_loss",
        "gauge",
        "Mean training loss of the last step over all ranks.",
        "Does the loss decrease?",
        StepRecord,
        lambda step: step.loss,
    ),
    Metric(
        "horovod_train_local_loss",
        "gauge",
        "This rank's contribution to the loss of the last step; contributions of all ranks add up to the "
        "loss.",
        "Does one rank read different data?",
        StepRecord,
        lambda step: step.local_loss,
    ),
    Metric(
        "horovod_train_learning_rate",
        "gauge",
        "Learning rate of the last step.",
        "Is the learning rate that of the schedule and the global batch?",
        StepRecord,
        lambda step: step.lr,
    ),
    Metric(
        "horovod_train_gradient_norm",
        "gauge",
        "L2 norm of the global gradient before clipping, when last computed.",
        "Do gradients explode or vanish?",
        StepRecord,
        StepNumber("grad_norm"),
    ),
    Metric(
        "horovod_train_allreduce_bytes_total",
        "counter",
        "Bytes of gradients and weights that this rank passed to collectives.",
        "How many bytes does a step send?",
        StepRecord,
        StepNumber("sent_bytes"),
    ),
    Metric(
        "horovod_train_compression_ratio",
        "gauge",
        "Bytes of the gradients divided by the bytes that this rank passed to collectives for them. Absent "
        "without gradient compression.",
        "How many bytes does gradient compression save?",
        StepRecord,
        StepNumber("compression_ratio"),
        shown="Gradient compression ratio",
    ),
    Metric(
        "horovod_train_noise_scale_samples",
        "gauge",
        "Gradient noise scale, an estimate of the critical batch size in samples. Absent unless the job "
        "measures it.",
        "Is the global batch larger than the critical batch size?",
        StepRecord,
        StepNumber("noise_scale"),
        shown="Gradient noise scale (samples)",
    ),
    Metric(
        "horovod_train_group_noise_scale_samples",
        "gauge",
        "Gradient noise scale of a parameter group, in samples. Absent unless the job measures it.",
        "Which part of the model limits the batch size?",
        GroupNoiseRecord,
        lambda groups: groups.noise_scales,
        label="group",
    ),
    Metric(
        "horovod_train_adascale_gain",
        "gauge",
        "Gain of AdaScale: factor of the base learning rate. Absent with other scaling rules.",
        "How many steps at the reference batch does a step replace?",
        StepRecord,
        StepNumber("adascale_gain"),
        shown="AdaScale gain",
    ),
    Metric(
        "horovod_train_non_finite_steps_total",
        "counter",
        "Steps that were skipped because loss or gradient was not finite; for scripts, steps in which that "
        "was observed.",
        "Are steps lost to NaN and infinity?",
        StepRecord,
        lambda step: None if step.is_finite is None else int(not step.is_finite),
    ),
    Metric(
        "horovod_train_model_flops_total",
        "counter",
        "Floating-point operations of forward and backward, by PyTorch's FLOP counter. Absent if it cannot "
        "count them.",
        "Which fraction of the device's peak does training use?",
        StepRecord,
        StepNumber("flops"),
        from_zero=False,
    ),
)

EXCHANGE = (
    Metric(
        "horovod_train_exchanged_bytes_total",
        "counter",
        "Bytes that all-reduces of this rank have summed, by Horovod's counter. Absent on GPUs.",
        "How fast is the network or memory between ranks?",
        ExchangeRecord,
        lambda exchange: exchange.size_bytes,
        from_zero=False,
    ),
    Metric(
        "horovod_train_exchange_seconds_total",
        "counter",
        "Duration of this rank's all-reduces, from the time when all ranks were ready, overlapped or not. "
        "Absent on GPUs.",
        "How fast is the network or memory between ranks?",
        ExchangeRecord,
        lambda exchange: exchange.seconds,
        from_zero=False,
    ),
    Metric(
        "horovod_train_gpu_exchanged_bytes_total",
        "counter",
        "Bytes that all-reduces have summed on this rank's GPU, through NCCL.",
        "How fast is the connection between GPUs?",
        GpuExchangeRecord,
        lambda exchange: exchange.size_bytes,
        from_zero=False,
    ),
    Metric(
        "horovod_train_gpu_exchange_seconds_total",
        "counter",
        "Duration of all-reduces on this rank's GPU, from the time when its data was ready, waiting for "
        "other ranks included. Minus allreduce_wait, it is the overlap with computation.",
        "How much communication overlaps computation?",
        GpuExchangeRecord,
        lambda exchange: exchange.seconds,
        from_zero=False,
    ),
)

JOB = (
    Metric(
        "horovod_train_device_peak_flops",
        "gauge",
        "Peak FLOP/s of this rank's device. Absent if unknown.",
        "Which fraction of the device's peak does training use?",
        ReferenceRecord,
        lambda reference: reference.peak_flops,
    ),
    Metric(
        "horovod_train_baseline_samples_per_second",
        "gauge",
        "Throughput of a finished run of the same job on one rank (rank 0). Absent if run_dir has none.",
        "How well does the job scale?",
        ReferenceRecord,
        lambda reference: reference.samples_per_s,
    ),
    Metric(
        "horovod_train_world_size_desired",
        "gauge",
        "Ranks that the job requested.",
        "Are all requested ranks running?",
        WorldRecord,
        lambda world: world.num_wanted,
    ),
    Metric(
        "horovod_train_world_size_present",
        "gauge",
        "World size: ranks that are running.",
        "Are all requested ranks running?",
        WorldRecord,
        lambda world: world.num_present,
    ),
    Metric(
        "horovod_train_rank_ended_timestamp_seconds",
        "gauge",
        "Time at which this rank ended, in the metrics for a Pushgateway or node_exporter; 0 while it runs.",
        "Is this a running rank, or the last metrics of an ended one?",
        EndRecord,
        lambda end: end.unix_s,
    ),
    Metric(
        "horovod_train_evaluation",
        "gauge",
        "Last evaluation, over all samples of all ranks.",
        "How good is the model?",
        EvaluationRecord,
        lambda evaluation: evaluation.metrics,
        label="metric",
    ),
    Metric(
        "horovod_train_evaluating",
        "gauge",
        "1 while this rank evaluates.",
        "Does the job hang, or does it evaluate?",
        EvaluatingRecord,
        lambda evaluating: float(evaluating.is_under_way),
    ),
    Metric(
        "horovod_train_checkpoint_write_seconds",
        "histogram",
        "Time to write and flush a checkpoint (rank 0).",
        "Is the file system fast enough for checkpoints?",
        WriteReport,
        lambda report: None if report.error else report.seconds,
        buckets_s=CHECKPOINT_BUCKETS_S,
    ),
    Metric(
        "horovod_train_checkpoint_size_bytes",
        "gauge",
        "Size of the last checkpoint (rank 0).",
        "How much space do checkpoints need?",
        WriteReport,
        lambda report: None if report.error else report.size_bytes,
    ),
    Metric(
        "horovod_train_checkpoint_age_seconds",
        "clock",
        "Time since the last checkpoint was written (rank 0).",
        "How much work would be lost if a host failed now?",
        WriteReport,
        _age,
    ),
    Metric(
        "horovod_train_checkpoint_failures_total",
        "counter",
        "Checkpoints that could not be written (rank 0).",
        "Are checkpoints written?",
        WriteReport,
        lambda report: 1 if report.error else None,
    ),
    Metric(
        "horovod_train_tracker_lost_calls_total",
        "counter",
        "Calls of experiment trackers that were dropped, because a tracker is slow, or failed (rank 0).",
        "Do the trackers have all values?",
        TrackerRecord,
        lambda calls: calls.num_lost,
    ),
    Metric(
        "horovod_train_grace_needed_seconds",
        "gauge",
        "Estimated time to preempt the job: steps until ranks agree, and a checkpoint (rank 0).",
        "Would a preemption lose work?",
        GraceRecord,
        lambda grace: grace.needed_s,
    ),
    Metric(
        "horovod_train_grace_granted_seconds",
        "gauge",
        "Grace period of a preemption, launch.grace_s (rank 0).",
        "Would a preemption lose work?",
        GraceRecord,
        lambda grace: grace.granted_s,
    ),
)

CATALOG = (*STEPS, *EXCHANGE, *JOB, *MACHINE)

SHOWN_NUMBERS = {
    metric.value.name: metric for metric in CATALOG if metric.shown and isinstance(metric.value, StepNumber)
}
"""``StepNumber.name`` -> its metric, for numbers of a step that dashboards, page and trackers show."""


def shown_numbers(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """Return the numbers of a step that are in ``SHOWN_NUMBERS`` and were computed."""
    return {name: value for name, value in numbers.items() if name in SHOWN_NUMBERS and value is not None}


SCRIPT_CATALOG = tuple(
    replace(metric, from_zero=False) if metric.source is StepRecord else metric for metric in CATALOG
)
"""``CATALOG`` for scripts: counters of step values are absent, not zero, until they are first observed."""
