"""Every metric of a rank once: name, kind, labels, meaning, the question it answers, and what feeds it.

A metric is a row of ``CATALOG``; those of the machine stand in ``catalog_machine.py``. Recorder,
documentation, dashboards, alert rules, the page in the browser and tests are made from it. What feeds a
metric is a class of ``records.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from horovod_train.checkpoint.write_report import WriteReport
from horovod_train.telemetry.catalog_machine import MACHINE
from horovod_train.telemetry.metric import Metric
from horovod_train.telemetry.records import (
    CurrentWaitRecord,
    EndRecord,
    EvaluatingRecord,
    EvaluationRecord,
    ExchangeRecord,
    GpuExchangeRecord,
    GraceRecord,
    ReferenceRecord,
    StepRecord,
    WaitRecord,
    WorldRecord,
)

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
CHECKPOINT_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)


def _age(report: WriteReport) -> Callable[[], float] | None:
    """Return what tells how long ago a checkpoint was written."""
    if report.error:
        return None
    written_s = time.monotonic()
    return lambda: time.monotonic() - written_s


STEPS = (
    Metric(
        "horovod_train_step_phase_seconds",
        "histogram",
        "Time of an optimizer step spent in a phase: data, forward, backward, allreduce_wait, optimizer; "
        "compute: several of these, where a framework does not tell them apart. On a GPU the device's time.",
        "Where does the time of a step go?",
        StepRecord,
        lambda step: step.phase_seconds,
        label="phase",
        buckets_s=STEP_BUCKETS_S,
    ),
    Metric(
        "horovod_train_step_seconds",
        "histogram",
        "Wall time of an optimizer step; on a GPU the device's, from its first work to its last.",
        "How long does a step take?",
        StepRecord,
        lambda step: step.seconds,
        buckets_s=STEP_BUCKETS_S,
    ),
    Metric(
        "horovod_train_own_seconds_total",
        "counter",
        "Time of steps without waiting for the all-reduce. Absent where a framework does not tell it apart.",
        "Which rank is slow? Steps take equally long on all ranks; this does not.",
        StepRecord,
        lambda step: step.own_seconds,
        from_zero=False,
    ),
    Metric(
        "horovod_train_waiting_seconds_total",
        "counter",
        "Time this rank waited in all-reduce for ranks that came later.",
        "How much time does a rank lose to slower ones?",
        WaitRecord,
        lambda wait: wait.waiting_s,
        from_zero=False,
    ),
    Metric(
        "horovod_train_waited_for_seconds_total",
        "counter",
        "Time that other ranks waited for this one, added up over them: per second, as many ranks stand idle "
        "because of it.",
        "Whom do the others wait for?",
        WaitRecord,
        lambda wait: wait.waited_for_s,
        from_zero=False,
    ),
    Metric(
        "horovod_train_communication_seconds_total",
        "counter",
        "Time that even the rank that came last waited in all-reduce: the exchange itself, as far as no "
        "computation hides it.",
        "Is the network what makes steps slow?",
        WaitRecord,
        lambda wait: wait.communication_s,
        from_zero=False,
    ),
    Metric(
        "horovod_train_waiting_now_seconds",
        "gauge",
        "For how long this rank has been waiting in the collective that it is in; 0 when it is in none.",
        "The job hangs: which rank has not come to the collective that the others wait in?",
        CurrentWaitRecord,
        lambda waiting: waiting.seconds,
    ),
    Metric(
        "horovod_train_steps_total",
        "counter",
        "Optimizer steps made by this process.",
        "Does training go on?",
        StepRecord,
        lambda _: 1,
    ),
    Metric(
        "horovod_train_samples_total",
        "counter",
        "Training samples read by this rank.",
        "How many samples a second does a rank train on, and all of them?",
        StepRecord,
        lambda step: step.num_samples,
    ),
    Metric(
        "horovod_train_step",
        "gauge",
        "The last optimizer step, counted from the beginning of training through all restarts. Absent where "
        "a script trains.",
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
        "Does it learn?",
        StepRecord,
        lambda step: step.loss,
    ),
    Metric(
        "horovod_train_local_loss",
        "gauge",
        "This rank's part of the last step's loss; parts add up to the loss.",
        "Does one rank read other data than the rest?",
        StepRecord,
        lambda step: step.local_loss,
    ),
    Metric(
        "horovod_train_learning_rate",
        "gauge",
        "Learning rate of the last step.",
        "Is the learning rate what the schedule and the global batch say?",
        StepRecord,
        lambda step: step.lr,
    ),
    Metric(
        "horovod_train_gradient_norm",
        "gauge",
        "L2 norm of the global gradient before clipping, when last taken.",
        "Do gradients explode or vanish?",
        StepRecord,
        lambda step: step.grad_norm,
    ),
    Metric(
        "horovod_train_allreduce_bytes_total",
        "counter",
        "Gradient bytes this rank gave to all-reduce.",
        "How much does a step send?",
        StepRecord,
        lambda step: step.bytes_reduced,
    ),
    Metric(
        "horovod_train_non_finite_steps_total",
        "counter",
        "Steps not used because loss or gradient was not finite; of a script, which decides itself what it "
        "uses, those of which that was seen.",
        "Are steps lost to NaN and infinity?",
        StepRecord,
        lambda step: None if step.is_finite is None else int(not step.is_finite),
    ),
    Metric(
        "horovod_train_model_flops_total",
        "counter",
        "Floating-point operations of forward and backward, as PyTorch's FLOP counter counts them. Absent "
        "where it cannot.",
        "How much of the device's speed does training use?",
        StepRecord,
        lambda step: step.flops,
        from_zero=False,
    ),
)

EXCHANGE = (
    Metric(
        "horovod_train_exchanged_bytes_total",
        "counter",
        "Bytes that all-reduces of this rank have summed, as the engine counts them. Absent on GPUs.",
        "How fast is the network, or the memory, that ranks exchange through?",
        ExchangeRecord,
        lambda exchange: exchange.size_bytes,
        from_zero=False,
    ),
    Metric(
        "horovod_train_exchange_seconds_total",
        "counter",
        "Time that all-reduces of this rank have taken from when all ranks were ready, hidden behind "
        "computation or not. Absent on GPUs.",
        "How fast is the network, or the memory, that ranks exchange through?",
        ExchangeRecord,
        lambda exchange: exchange.seconds,
        from_zero=False,
    ),
    Metric(
        "horovod_train_gpu_exchanged_bytes_total",
        "counter",
        "Bytes that all-reduces have summed on this rank's GPU, through NCCL.",
        "How fast is what GPUs exchange through?",
        GpuExchangeRecord,
        lambda exchange: exchange.size_bytes,
        from_zero=False,
    ),
    Metric(
        "horovod_train_gpu_exchange_seconds_total",
        "counter",
        "Time that all-reduces were under way on this rank's GPU, from when its data was ready: waiting for "
        "other ranks is part of it. What is more than allreduce_wait was hidden behind computation.",
        "How much of the communication is hidden behind computation?",
        GpuExchangeRecord,
        lambda exchange: exchange.seconds,
        from_zero=False,
    ),
)

JOB = (
    Metric(
        "horovod_train_device_peak_flops",
        "gauge",
        "Floating-point operations a second that this rank's device can do at most. Absent where that is "
        "not known.",
        "How much of the device's speed does training use?",
        ReferenceRecord,
        lambda reference: reference.peak_flops,
    ),
    Metric(
        "horovod_train_baseline_samples_per_second",
        "gauge",
        "Samples a second of a finished run of the same job on one rank (rank 0). Absent where run_dir has "
        "none.",
        "How well does the job scale?",
        ReferenceRecord,
        lambda reference: reference.samples_per_s,
    ),
    Metric(
        "horovod_train_world_size_wanted",
        "gauge",
        "Ranks the job asked for.",
        "Is the world as large as it was to be?",
        WorldRecord,
        lambda world: world.num_wanted,
    ),
    Metric(
        "horovod_train_world_size_present",
        "gauge",
        "Ranks that take part.",
        "Is the world as large as it was to be?",
        WorldRecord,
        lambda world: world.num_present,
    ),
    Metric(
        "horovod_train_rank_ended_timestamp_seconds",
        "gauge",
        "When this rank has ended, in what it leaves behind for a Pushgateway or node_exporter; 0 while it "
        "has not.",
        "Is this a rank that trains, or what one has left behind?",
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
        "1 while this rank evaluates, and makes no steps.",
        "Does the job stand still, or does it evaluate?",
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
        "How much room do checkpoints take?",
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
        "Are checkpoints written at all?",
        WriteReport,
        lambda report: 1 if report.error else None,
    ),
    Metric(
        "horovod_train_grace_needed_seconds",
        "gauge",
        "Time the ranks need to save and leave when asked to: steps until they agree, and a checkpoint "
        "(rank 0).",
        "Does a preemption lose work?",
        GraceRecord,
        lambda grace: grace.needed_s,
    ),
    Metric(
        "horovod_train_grace_granted_seconds",
        "gauge",
        "Time the ranks get to save and leave, launch.grace_s (rank 0).",
        "Does a preemption lose work?",
        GraceRecord,
        lambda grace: grace.granted_s,
    ),
)

CATALOG = (*STEPS, *EXCHANGE, *JOB, *MACHINE)

SCRIPT_CATALOG = tuple(
    replace(metric, from_zero=False) if metric.source is StepRecord else metric for metric in CATALOG
)
"""The same, of a script: what cannot be seen from outside is absent, not zero."""
