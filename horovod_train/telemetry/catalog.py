"""Every metric once: name, kind, labels and meaning. Exporter, documentation and tests read this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RANK_LABELS = ("training_job", "run", "rank", "local_rank", "host")
"""Labels of every metric. Not ``job``: that is Prometheus' own word for what it scrapes together."""

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
CHECKPOINT_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: Name with its unit, as Prometheus shows it.
        kind: Prometheus type.
        help: What it means, one sentence.
        labels: Labels besides those of the rank.
        buckets_s: Upper bounds of a histogram, in seconds.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets_s: tuple[float, ...] = ()


PREFIX = "horovod_train_"

STEP_PHASE = Metric(
    PREFIX + "step_phase_seconds",
    "histogram",
    "Time of an optimizer step spent in a phase: data, forward, backward, allreduce_wait, optimizer; "
    "compute: several of these, where a framework does not tell them apart.",
    labels=("phase",),
    buckets_s=STEP_BUCKETS_S,
)
STEP = Metric(
    PREFIX + "step_seconds", "histogram", "Wall time of an optimizer step.", buckets_s=STEP_BUCKETS_S
)
STEPS = Metric(PREFIX + "steps_total", "counter", "Optimizer steps made by this process.")
SAMPLES = Metric(PREFIX + "samples_total", "counter", "Training samples read by this rank.")
EPOCH = Metric(PREFIX + "epoch", "gauge", "Epochs passed, with the fraction of the current one.")
LOSS = Metric(PREFIX + "loss", "gauge", "Mean training loss of the last step over all ranks.")
LOCAL_LOSS = Metric(
    PREFIX + "local_loss", "gauge", "This rank's part of the last step's loss; parts add up to the loss."
)
LEARNING_RATE = Metric(PREFIX + "learning_rate", "gauge", "Learning rate of the last step.")
GRAD_NORM = Metric(
    PREFIX + "gradient_norm", "gauge", "L2 norm of the global gradient before clipping, when last taken."
)
BYTES_REDUCED = Metric(
    PREFIX + "allreduce_bytes_total", "counter", "Gradient bytes this rank gave to all-reduce."
)
NON_FINITE = Metric(
    PREFIX + "non_finite_steps_total", "counter", "Steps not used because loss or gradient was not finite."
)
WORLD_WANTED = Metric(PREFIX + "world_size_wanted", "gauge", "Ranks the job asked for.")
WORLD_PRESENT = Metric(PREFIX + "world_size_present", "gauge", "Ranks that take part.")
EVALUATION = Metric(
    PREFIX + "evaluation", "gauge", "Last evaluation, over all samples of all ranks.", labels=("metric",)
)
CHECKPOINT_WRITE = Metric(
    PREFIX + "checkpoint_write_seconds",
    "histogram",
    "Time to write and flush a checkpoint (rank 0).",
    buckets_s=CHECKPOINT_BUCKETS_S,
)
CHECKPOINT_BYTES = Metric(PREFIX + "checkpoint_size_bytes", "gauge", "Size of the last checkpoint (rank 0).")
CHECKPOINT_AGE = Metric(
    PREFIX + "checkpoint_age_seconds", "gauge", "Time since the last checkpoint was written (rank 0)."
)
CHECKPOINT_FAILURES = Metric(
    PREFIX + "checkpoint_failures_total", "counter", "Checkpoints that could not be written (rank 0)."
)
GRACE_NEEDED = Metric(
    PREFIX + "grace_needed_seconds",
    "gauge",
    "Time the ranks need to save and leave when asked to: steps until they agree, and a checkpoint (rank 0).",
)

CATALOG = (
    STEP_PHASE,
    STEP,
    STEPS,
    SAMPLES,
    EPOCH,
    LOSS,
    LOCAL_LOSS,
    LEARNING_RATE,
    GRAD_NORM,
    BYTES_REDUCED,
    NON_FINITE,
    WORLD_WANTED,
    WORLD_PRESENT,
    EVALUATION,
    CHECKPOINT_WRITE,
    CHECKPOINT_BYTES,
    CHECKPOINT_AGE,
    CHECKPOINT_FAILURES,
    GRACE_NEEDED,
)


def catalog_as_markdown() -> str:
    """Return the table of the README."""
    rows = ["| metric | type | meaning |", "|---|---|---|"]
    for metric in CATALOG:
        by = "".join(f" by {label}" for label in metric.labels)
        rows.append(f"| `{metric.name}`{by} | {metric.kind} | {metric.help} |")
    return "\n".join(rows)
