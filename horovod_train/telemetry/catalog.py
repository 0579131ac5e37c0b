"""Metrics of a rank: name, type, help text, question that it answers, source record, and value.

Recorder, documentation, dashboards, alert rules, web page and tests are derived from ``CATALOG``. Machine
metrics are in ``catalog_machine.py``. Sources of metrics are classes of ``records.py``, and ``WriteReport``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from horovod_train.checkpoint.write_report import WriteReport
from horovod_train.telemetry.catalog_machine import MACHINE
from horovod_train.telemetry.metric import Metric, StepNumber
from horovod_train.telemetry.records import (
    CurrentWaitRecord,
    EndRecord,
    EvaluatingRecord,
    EvaluationRecord,
    ExchangeRecord,
    GpuExchangeRecord,
    GraceRecord,
    GroupNoiseRecord,
    ReferenceRecord,
    StepRecord,
    TrackerRecord,
    WaitRecord,
    WorldRecord,
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
        "horovod_train_world_size_wanted",
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
