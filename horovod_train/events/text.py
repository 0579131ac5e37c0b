"""Events as text for a person."""

from __future__ import annotations

import math
from collections.abc import Iterator

from horovod_train.events.types import (
    Evaluation,
    Event,
    Failure,
    Notice,
    Preempted,
    Progress,
    Resumed,
    ScriptDone,
    Started,
    Summary,
)


def tagged(rank: int | None, text: str) -> str:
    """Return what a rank has said, with its number; None: it is not known who said it."""
    return text if rank is None else f"[rank {rank}] {text}"


def as_text(event: Event, rank: int) -> str | None:
    """Return an event of a rank for a person; None for what a person need not see."""
    text: str | None = None
    match event:
        case Started():
            text = _started_text(event)
        case Progress():
            text = progress_text(event)
        case Evaluation():
            found = ", ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
            text = f"epoch {event.epoch}: {found}"
        case Resumed():
            text = f"resumed from {event.checkpoint}: epoch {event.epoch}, step {event.step}"
        case Notice():
            text = f"rank {rank}: {event.text}"
        case Preempted():
            text = f"rank {rank}: asked to leave; saved after step {event.step}"
        case ScriptDone():
            text = f"rank {rank}: the script has ended: {event.steps} steps, {duration(event.seconds)}"
        case Summary():
            text = "\n".join(summary_lines(event))
        case Failure():
            text = f"error: rank {rank} on {event.host}: {event.message}"
    return text


def progress_text(event: Progress) -> str:
    """Return one line of progress; of a script, nobody knows how far it is to go."""
    if not event.num_epochs:
        speed = f"{event.samples_per_s:,.0f} samples/s"
        return f"step {event.step}  loss {event.loss:.4f}  lr {event.lr:.4g}  {speed}"
    return (
        f"epoch {event.epoch + 1}/{event.num_epochs}  step {event.step}/{event.num_steps}  "
        f"{100 * event.step / max(1, event.num_steps):.0f} %  loss {event.loss:.4f}  lr {event.lr:.4g}  "
        f"{event.samples_per_s:,.0f} samples/s  ETA {duration(event.eta_s)}"
    )


def summary_lines(event: Summary) -> Iterator[str]:
    """Yield the lines that end a run."""
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
    yield f"trained {event.job}: {event.epochs:g} epochs, {event.steps} steps, {duration(event.seconds)}"
    yield f"  evaluation      {metrics or 'none'}"
    yield f"  throughput      {event.samples_per_s:,.0f} samples/s, {event.world_size} rank(s)"
    yield f"  global batch    {event.global_batch_size}"
    lr = learning_rate(event.lr_scaling, event.base_lr, event.reference_batch_size, event.peak_lr)
    yield f"  learning rate   {lr}"
    yield f"  metrics         {', '.join(event.metrics_addresses) or 'not served'}"
    yield f"  checkpoint      {event.checkpoint or 'none'}"


def learning_rate(scaling: str, base_lr: float, reference_batch_size: int, peak_lr: float) -> str:
    """Return how a base rate becomes the peak rate, for a person.

    >>> learning_rate("linear", 0.1, 256, 3.2)
    'linear: base 0.1 at batch 256 -> peak 3.2'
    """
    return f"{scaling}: base {base_lr:g} at batch {reference_batch_size} -> peak {peak_lr:g}"


def duration(seconds: float) -> str:
    """Return a duration for a person.

    >>> duration(5), duration(75), duration(3661)
    ('5 s', '1:15', '1:01:01')
    """
    if not math.isfinite(seconds):
        return "unknown"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def _started_text(event: Started) -> str:
    ranks = "1 rank" if event.world_size == 1 else f"{event.world_size} ranks"
    if not event.global_batch_size:
        return f"{event.job}: {event.num_parameters:,} parameters on {ranks}, on {event.device}"
    return (
        f"{event.job}: {event.num_parameters:,} parameters on {ranks}, "
        f"global batch {event.global_batch_size}, {event.precision} on {event.device}"
    )
