"""Every metric once: name, kind, labels, meaning, and what feeds it, for recorder, documentation and tests.

A metric is a row of ``CATALOG``. What feeds it is a class below, which training hands to the recorder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from horovod_train.checkpoint.manager import WriteReport

RANK_LABELS = ("training_job", "run", "rank", "local_rank", "host")
"""Labels of every metric. Not ``job``: that is Prometheus' own word for what it scrapes together."""

PREFIX = "horovod_train_"
STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
CHECKPOINT_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)


@dataclass(slots=True)  # frozen, it would take four times as long to make, in each step
class StepRecord:
    """One optimizer step of this rank.

    Attributes:
        phase_seconds: Where its time went.
        num_samples: Samples that this rank read.
        epochs: Epochs passed, with the fraction of the current one.
        loss: Mean loss over the samples of the step, over all ranks.
        local_loss: This rank's part of it.
        lr: Learning rate.
        grad_norm: L2 norm of the gradient before clipping; None when it was not taken.
        bytes_reduced: Bytes this rank put on the wire.
        is_finite: The step was used.
    """

    phase_seconds: Mapping[str, float]
    num_samples: int
    epochs: float
    loss: float
    local_loss: float
    lr: float
    grad_norm: float | None
    bytes_reduced: int
    is_finite: bool


@dataclass(frozen=True)
class EvaluationRecord:
    """The metrics of one evaluation, over all samples of all ranks."""

    metrics: Mapping[str, float]


@dataclass(frozen=True)
class WorldRecord:
    """How many ranks the job asked for, and how many take part."""

    num_wanted: int
    num_present: int


@dataclass(frozen=True)
class GraceRecord:
    """How long leaving would take."""

    seconds: float


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: Name with its unit, as Prometheus shows it.
        kind: A counter is increased by the value, a gauge set to it, a histogram given it; a clock is a
            gauge whose value is a function, asked at each scrape.
        help: What it means, one sentence.
        source: The class that feeds it.
        value: What it takes of that; where it has a label, a mapping from the label to it; None: nothing.
        label: A label besides those of the rank; None: there is none.
        buckets_s: Upper bounds of a histogram, in seconds.
    """

    name: str
    kind: Literal["counter", "gauge", "clock", "histogram"]
    help: str
    source: type
    value: Callable[..., Any]
    label: str | None = None
    buckets_s: tuple[float, ...] = ()

    @property
    def prometheus_type(self) -> str:
        """Its type as Prometheus knows it."""
        return "gauge" if self.kind == "clock" else self.kind


def _age(report: WriteReport) -> Callable[[], float] | None:
    """Return what tells how long ago a checkpoint was written."""
    if report.error:
        return None
    written_s = time.monotonic()
    return lambda: time.monotonic() - written_s


CATALOG = (
    Metric(
        PREFIX + "step_phase_seconds",
        "histogram",
        "Time of an optimizer step spent in a phase: data, forward, backward, allreduce_wait, optimizer; "
        "compute: several of these, where a framework does not tell them apart.",
        StepRecord,
        lambda step: step.phase_seconds,
        label="phase",
        buckets_s=STEP_BUCKETS_S,
    ),
    Metric(
        PREFIX + "step_seconds",
        "histogram",
        "Wall time of an optimizer step.",
        StepRecord,
        lambda step: sum(step.phase_seconds.values()),
        buckets_s=STEP_BUCKETS_S,
    ),
    Metric(
        PREFIX + "steps_total",
        "counter",
        "Optimizer steps made by this process.",
        StepRecord,
        lambda _: 1,
    ),
    Metric(
        PREFIX + "samples_total",
        "counter",
        "Training samples read by this rank.",
        StepRecord,
        lambda step: step.num_samples,
    ),
    Metric(
        PREFIX + "epoch",
        "gauge",
        "Epochs passed, with the fraction of the current one.",
        StepRecord,
        lambda step: step.epochs,
    ),
    Metric(
        PREFIX + "loss",
        "gauge",
        "Mean training loss of the last step over all ranks.",
        StepRecord,
        lambda step: step.loss,
    ),
    Metric(
        PREFIX + "local_loss",
        "gauge",
        "This rank's part of the last step's loss; parts add up to the loss.",
        StepRecord,
        lambda step: step.local_loss,
    ),
    Metric(
        PREFIX + "learning_rate",
        "gauge",
        "Learning rate of the last step.",
        StepRecord,
        lambda step: step.lr,
    ),
    Metric(
        PREFIX + "gradient_norm",
        "gauge",
        "L2 norm of the global gradient before clipping, when last taken.",
        StepRecord,
        lambda step: step.grad_norm,
    ),
    Metric(
        PREFIX + "allreduce_bytes_total",
        "counter",
        "Gradient bytes this rank gave to all-reduce.",
        StepRecord,
        lambda step: step.bytes_reduced,
    ),
    Metric(
        PREFIX + "non_finite_steps_total",
        "counter",
        "Steps not used because loss or gradient was not finite.",
        StepRecord,
        lambda step: None if step.is_finite else 1,
    ),
    Metric(
        PREFIX + "world_size_wanted",
        "gauge",
        "Ranks the job asked for.",
        WorldRecord,
        lambda world: world.num_wanted,
    ),
    Metric(
        PREFIX + "world_size_present",
        "gauge",
        "Ranks that take part.",
        WorldRecord,
        lambda world: world.num_present,
    ),
    Metric(
        PREFIX + "evaluation",
        "gauge",
        "Last evaluation, over all samples of all ranks.",
        EvaluationRecord,
        lambda evaluation: evaluation.metrics,
        label="metric",
    ),
    Metric(
        PREFIX + "checkpoint_write_seconds",
        "histogram",
        "Time to write and flush a checkpoint (rank 0).",
        WriteReport,
        lambda report: None if report.error else report.seconds,
        buckets_s=CHECKPOINT_BUCKETS_S,
    ),
    Metric(
        PREFIX + "checkpoint_size_bytes",
        "gauge",
        "Size of the last checkpoint (rank 0).",
        WriteReport,
        lambda report: None if report.error else report.size_bytes,
    ),
    Metric(
        PREFIX + "checkpoint_age_seconds",
        "clock",
        "Time since the last checkpoint was written (rank 0).",
        WriteReport,
        _age,
    ),
    Metric(
        PREFIX + "checkpoint_failures_total",
        "counter",
        "Checkpoints that could not be written (rank 0).",
        WriteReport,
        lambda report: 1 if report.error else None,
    ),
    Metric(
        PREFIX + "grace_needed_seconds",
        "gauge",
        "Time the ranks need to save and leave when asked to: steps until they agree, and a checkpoint "
        "(rank 0).",
        GraceRecord,
        lambda grace: grace.seconds,
    ),
)


def catalog_as_markdown() -> str:
    """Return the table of the README."""
    rows = ["| metric | type | meaning |", "|---|---|---|"]
    for metric in CATALOG:
        by = f" by {metric.label}" if metric.label else ""
        rows.append(f"| `{metric.name}`{by} | {metric.prometheus_type} | {metric.help} |")
    return "\n".join(rows)
