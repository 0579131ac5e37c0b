"""Conversion of events to lines of output, and parsing of the output of launchers and ranks.

    as_text, summary_lines          events as human-readable text
    Reporter                        writer of the events of one rank
    Line, parse_line                a line of output, parsed
    parse_targets, as_document      metrics endpoints of ranks, in the format of Prometheus' service
                                    discovery

A worker of ``horovod-train run`` writes events as marked JSON lines to the channel of the run
(``file.py``), or else to its output. A worker that was started manually writes them as text.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TextIO

from horovod_train.errors import describe_ranks
from horovod_train.events.file import ChannelWriter, EventsFile
from horovod_train.events.types import (
    KINDS,
    Evaluation,
    Event,
    Failure,
    Hang,
    LossSpike,
    Notice,
    Preempted,
    Progress,
    Restart,
    Resumed,
    ScriptDone,
    Stalled,
    Started,
    Summary,
    Target,
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
        case LossSpike():
            back = "" if event.restored is None else f"; back to the checkpoint of step {event.restored}"
            text = (
                f"warning: the loss of step {event.step} is {event.loss:.4g} (usual: {event.usual:.4g}){back}"
            )
        case Restart():
            text = f"restart {event.number} of {event.most} in {event.pause_s:g} s, after: {event.reason}"
        case Hang():
            report = f"\n  what all ranks do: {event.report}" if event.report else ""
            text = f"warning: {event.text}{report}"
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


MARK = "@horovod-train "
# Launchers put a tag before each chunk of output: "[1,0]<stdout>:" (mpirun), "[0]<stdout>:" (Gloo). A space
# after the tag belongs to the chunk.
TAG = re.compile(r"\[(?:\d+,)?(\d+)\]<std(?:out|err)>:")
_ANY_TAG = re.compile(r"(\[(?:\d+,)?\d+\]<std(?:out|err)>:)")


@dataclass(frozen=True)
class Line:
    """One line of a launcher's output.

    Attributes:
        raw: The line as received.
        rank: Rank that wrote it; None: the launcher, or unknown.
        text: The line without the launcher's tag, and without an event that follows a text.
        event: The event in the text; None: ordinary output.
        is_launchers: Whether the line is the launcher's own output.
    """

    raw: str
    rank: int | None
    text: str
    event: Event | None = None
    is_launchers: bool = False

    @property
    def is_tagged(self) -> bool:
        """Whether the line has a launcher's tag."""
        return TAG.match(self.raw) is not None

    def readable(self) -> str | None:
        """Return the line as text; None for events that are not shown to the user."""
        if self.event is None:
            return tagged(self.rank, self.text)
        return self.text if self.has_text else as_text(self.event, self.rank or 0)

    @property
    def has_text(self) -> bool:
        """Whether the line has a text beside its event."""
        return not self.text.startswith(MARK)


@dataclass
class Reporter:
    """Writer of the events of one rank.

    Attributes:
        rank: This rank.
        as_json: Write JSON instead of text.
        stream: Output; None: events are written only to ``file``.
        file: Events file to which events are written in addition.
        channel: Channel for JSON lines, instead of ``stream``.
        observers: Called with each event; they must not block.
        exit_code: Exit code of this rank, once its failure is reported.
        step: Returns the number of steps that are done; None: training has not begun.
    """

    rank: int
    as_json: bool
    stream: TextIO | None = field(default_factory=lambda: sys.stdout)
    file: EventsFile | None = None
    channel: ChannelWriter | None = None
    observers: list[Callable[[Event], None]] = field(default_factory=list)
    exit_code: int | None = None
    step: Callable[[], int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, event: Event) -> None:
        """Write an event in one call, so that launchers do not split its line; thread-safe."""
        if self.file is not None:
            self.file.write(event, self.rank)
        for observe in self.observers:
            observe(event)
        text = to_line(event, self.rank) if self.as_json else as_text(event, self.rank)
        if text is None or self.stream is None:
            return
        with self._lock:
            if self.channel is not None and self.as_json:
                try:
                    self.channel.write(text)
                except OSError:
                    pass  # the disk is full, or the folder was removed: use the output
                else:
                    return
            self.stream.write(text + "\n")
            self.stream.flush()


def to_line(event: Event, rank: int) -> str:
    """Return an event as a marked JSON line."""
    return MARK + json.dumps({"kind": event.kind, "rank": rank, **event.model_dump()})


def with_event(text: str | None, event: Event, rank: int) -> str:
    """Return a line with a text and its event, for output that people and ``parse_line`` read."""
    return f"{text}  {to_line(event, rank)}" if text else to_line(event, rank)


def parse_line(raw: str) -> Line:
    """Parse a line of a launcher's output.

    >>> parse_line('[1,3]<stdout>:hello').rank
    3
    >>> parse_line('mpirun: something').rank is None
    True
    """
    found = TAG.match(raw)
    rank = int(found[1]) if found else None
    text = (raw[found.end() :] if found else raw).rstrip("\r\n")
    before, mark, document = text.partition(MARK)
    if mark:
        try:
            return Line(raw, *_parse_event(document, before.rstrip() or text))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # output of a task that looks like an event
    return Line(raw, rank, text, is_launchers=rank is None)


def split_at_event(raw: str) -> list[str]:
    r"""Split a line in which an event follows an unfinished line of the task; return the parts.

    >>> split_at_event('[1,0]<stdout>:reading ... @horovod-train {"kind": "resumed"}')
    ['[1,0]<stdout>:reading ... ', '[1,0]<stdout>:@horovod-train {"kind": "resumed"}']
    """
    found = TAG.match(raw)
    tag, text = (raw[: found.end()], raw[found.end() :]) if found else ("", raw)
    before, mark, event = text.partition(MARK)
    return [f"{tag}{before}", f"{tag}{mark}{event}"] if before and mark else [raw]


def _parse_event(document: str, text: str) -> tuple[int, str, Event]:
    fields = json.loads(document)
    if not isinstance(rank := fields["rank"], int):
        raise TypeError(f"rank {rank!r}")
    return rank, text, KINDS[fields["kind"]].model_validate_json(document)


def with_standard_tags(lines: Iterable[str], tag: str) -> Iterator[str]:
    r"""Replace the tags of a launcher, which match a pattern with the rank as its group; empty: no change.

    >>> list(with_standard_tags(["  1: hello", "srun: error"], r"\s*(\d+): ?"))
    ['[1]<stdout>:hello', 'srun: error']
    """
    if not tag:
        yield from lines
        return
    pattern = re.compile(tag)
    for line in lines:
        found = pattern.match(line)
        yield f"[{found[1]}]<stdout>:{line[found.end() :]}" if found else line


def lines_of_ranks(lines: Iterable[str]) -> Iterator[str]:
    r"""Yield the complete lines of ranks from the tagged output of their launcher.

    A launcher prints a tag before each chunk that it reads from a rank, even in the middle of a line. One
    line of its output may therefore contain chunks of several ranks.

    Yields:
        Lines without newline, each with at most one tag, at the start. Unfinished lines follow at the end.

    >>> list(lines_of_ranks(["[1,0]<stdout>:a lo[1,1]<stdout>:hello\n", "[1,0]<stdout>:ng line\n"]))
    ['[1,1]<stdout>:hello', '[1,0]<stdout>:a long line']
    """
    begun: dict[str, str] = {}
    for line in lines:
        text = line.rstrip("\n")
        before, *pieces = _ANY_TAG.split(text)
        if before or not pieces:
            yield before
        for tag, piece in zip(pieces[::2], pieces[1::2], strict=True):
            begun[tag] = begun.get(tag, "") + piece
        if pieces:
            ended = pieces[-2]
            yield ended + begun.pop(ended)
    yield from (tag + text for tag, text in begun.items())


def parse_targets(text: str | bytes) -> list[Target]:
    """Parse a document of Prometheus' file or HTTP service discovery.

    Raises:
        ValueError: The document is not valid; also KeyError, TypeError or AttributeError.
    """
    return [
        Target(address=str(address), labels={str(k): str(v) for k, v in group.get("labels", {}).items()})
        for group in json.loads(text)
        for address in group["targets"]
    ]


def as_document(targets: Iterable[Target]) -> list[dict[str, object]]:
    """Return targets as a document of Prometheus' service discovery."""
    return [{"targets": [target.address], "labels": dict(target.labels)} for target in targets]
