"""Events as human-readable text."""

from __future__ import annotations

import math
from collections.abc import Iterator

from horovod_train.errors import describe_ranks
from horovod_train.events.types import (
    Evaluation,
    Event,
    Failure,
    Notice,
    Preempted,
    Progress,
    Resumed,
    ScriptDone,
    Stalled,
    Started,
    Summary,
    Targets,
)


def tagged(rank: int | None, text: str) -> str:
    """Return output of a rank, prefixed with the rank; None: the rank is unknown, no prefix."""
    return text if rank is None else f"[rank {rank}] {text}"


def as_text(event: Event, rank: int) -> str | None:
    """Return an event of a rank as text; None for events that are not shown to the user."""
    text: str | None = None
    match event:
        case Started():
            text = _started_text(event)
        case Targets():
            text = _targets_text(event)
        case Progress():
            text = progress_text(event)
        case Evaluation():
            found = ", ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
            text = f"{f'step {event.step}' if event.is_within_epoch else f'epoch {event.epoch}'}: {found}"
        case Resumed():
            text = f"resumed from {event.checkpoint}: epoch {event.epoch}, step {event.step}"
        case Summary():
            text = "\n".join(summary_lines(event))
    return text or _text_with_rank(event, rank)


def stalled_text(event: Stalled) -> str:
    """Return a sentence with the ranks that are missing from a collective."""
    return f"{describe_ranks(event.absent_ranks)} did not join {event.collective} for {event.seconds:.0f} s"


def _text_with_rank(event: Event, rank: int) -> str | None:
    """Return an event of a single rank as text; None for any other event."""
    match event:
        case Notice():
            return f"rank {rank}: {event.text}"
        case Stalled():
            return f"rank {rank}: {stalled_text(event)}"
        case Preempted():
            return f"rank {rank}: preempted; saved after step {event.step}"
        case ScriptDone():
            return f"rank {rank}: the script has ended: {event.steps} steps, {duration(event.seconds)}"
        case Failure():
            return f"error: rank {rank} on {event.host}: {event.message}"
        case _:
            return None


def progress_text(event: Progress) -> str:
    """Return one line of progress, without unknown values.

    >>> progress_text(Progress(step=3, num_steps=0, epoch=0, num_epochs=0, loss=0.5, lr=None,
    ...                        samples_per_s=None, eta_s=None, loss_is_local=True))
    'step 3  loss of rank 0: 0.5000'
    """
    parts = (
        f"epoch {event.epoch + 1}/{event.num_epochs}" if event.num_epochs else "",
        f"step {event.step}/{event.num_steps}" if event.num_steps else f"step {event.step}",
        f"{100 * event.step / event.num_steps:.0f} %" if event.num_steps else "",
        # The loss of a script is that of rank 0, which reports progress.
        _known("loss of rank 0: {:.4f}" if event.loss_is_local else "loss {:.4f}", event.loss),
        _known("lr {:.4g}", event.lr),
        _known("{:,.0f} samples/s", event.samples_per_s),
        "" if event.eta_s is None else f"ETA {duration(event.eta_s)}",
    )
    return "  ".join(filter(None, parts))


def _known(how: str, number: float | None) -> str:
    return "" if number is None else how.format(number)


def summary_lines(event: Summary) -> Iterator[str]:
    """Yield the lines of a run's summary."""
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
    yield f"trained {event.job}: {event.epochs:g} epochs, {event.steps} steps, {duration(event.seconds)}"
    yield f"  evaluation      {metrics or 'none'}"
    speed = f"{event.samples_per_s:,.0f} samples/s, {event.world_size} rank(s)"
    # Shown if the run resumed from a checkpoint of the last step.
    nothing = "nothing was left to train; --set checkpoint.resume=never starts from the beginning"
    yield f"  throughput      {speed if event.samples_per_s else nothing}"
    yield f"  global batch    {event.global_batch_size}"
    lr = learning_rate(event.lr_scaling, event.base_lr, event.reference_batch_size, event.peak_lr)
    yield f"  learning rate   {lr}"
    yield f"  metrics         {', '.join(event.metrics_addresses) or 'not served'}"
    yield f"  checkpoint      {event.checkpoint or 'none'}"


def learning_rate(scaling: str, base_lr: float, reference_batch_size: int, peak_lr: float) -> str:
    """Return the scaling of the base rate to the peak rate, as text.

    >>> learning_rate("linear", 0.1, 256, 3.2)
    'linear: base 0.1 at batch 256 -> peak 3.2'
    """
    return f"{scaling}: base {base_lr:g} at batch {reference_batch_size} -> peak {peak_lr:g}"


def duration(seconds: float) -> str:
    """Return a duration as text.

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


def _targets_text(event: Targets) -> str | None:
    """Return the metrics address of rank 0 as text; other ranks' are in the files for Prometheus."""
    found = [each.address for each in event.targets if each.labels.get("rank") == "0"]
    return f"metrics of rank 0: {found[0]}" if found else None


def _started_text(event: Started) -> str:
    ranks = "1 rank" if event.world_size == 1 else f"{event.world_size} ranks"
    if not event.global_batch_size:
        return f"{event.job}: {event.num_parameters:,} parameters on {ranks}, on {event.device}"
    return (
        f"{event.job}: {event.num_parameters:,} parameters on {ranks}, "
        f"global batch {event.global_batch_size}, {event.precision} on {event.device}"
    )
