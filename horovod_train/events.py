"""What a worker tells: one line per event, read by ``horovod-train run`` or by a person.

Started by ``run``, a worker writes events as marked JSON lines and ``run`` shows them. Started by
hand, it writes the same events as text. Nothing else about a worker depends on who started it.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO, get_args

MARK = "@horovod-train "
# Launchers put a tag before each piece of output: "[1,0]<stdout>:" (mpirun), "[0]<stdout>:" (Gloo). What
# follows is the piece, even if it begins with a space.
TAG = re.compile(r"\[(?:\d+,)?(\d+)\]<std(?:out|err)>:")
_ANY_TAG = re.compile(r"(\[(?:\d+,)?\d+\]<std(?:out|err)>:)")

Kind = Literal[
    "started",
    "targets",
    "progress",
    "evaluation",
    "checkpoint",
    "resumed",
    "notice",
    "left",
    "sweep",
    "pair",
    "swept",
    "summary",
    "failure",
]


Number = (int, float)
# What a reader relies on. A task may print a line that looks like an event, and is not one.
FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "started": {
        "job": str,
        "num_parameters": int,
        "world_size": int,
        "global_batch_size": int,
        "precision": str,
        "device": str,
    },
    "targets": {"targets": list},
    "progress": {
        "step": int,
        "num_steps": int,
        "epoch": int,
        "num_epochs": int,
        "loss": Number,
        "lr": Number,
        "samples_per_s": Number,
        "eta_s": Number,
    },
    "evaluation": {"epoch": int, "metrics": dict},
    "checkpoint": {"path": str, "seconds": Number, "error": str},
    "resumed": {"checkpoint": str, "epoch": Number, "step": int},
    "notice": {"text": str},
    "left": {"step": int, "epoch": Number},
    "sweep": {"via": str, "size_bytes": int, "seconds": Number, "bytes_per_s": Number},
    "pair": {"hosts": list, "seconds": Number},
    "swept": {"world_size": int},
    "summary": {
        "job": str,
        "epochs": Number,
        "steps": int,
        "seconds": Number,
        "metrics": dict,
        "samples_per_s": Number,
        "world_size": int,
        "global_batch_size": int,
        "lr_scaling": str,
        "base_lr": Number,
        "reference_batch_size": int,
        "peak_lr": Number,
        "metrics_addresses": list,
        "checkpoint": str,
    },
    "failure": {"host": str, "message": str, "traceback": str, "is_cause": bool, "exit_code": int},
}
assert FIELDS.keys() == set(get_args(Kind))


@dataclass(frozen=True)
class Event:
    """One thing that happened on a rank."""

    kind: str
    rank: int
    fields: Mapping[str, Any] = field(default_factory=dict)

    def as_line(self) -> str:
        """Return the event for another program."""
        return MARK + json.dumps({"kind": self.kind, "rank": self.rank, **self.fields})


@dataclass
class Reporter:
    """Writes events of one rank.

    Attributes:
        rank: This rank.
        as_json: For another program instead of a person.
        stream: Where to.
    """

    rank: int
    as_json: bool
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def emit(self, kind: Kind, **fields: Any) -> None:
        """Write an event in one piece, so that launchers do not tear it apart."""
        event = Event(kind, self.rank, fields)
        text = event.as_line() if self.as_json else as_text(event)
        if text is None:
            return
        with self._lock:
            self.stream.write(text + "\n")
            self.stream.flush()


def parse_line(line: str) -> tuple[int | None, str, Event | None]:
    """Split a line of a launcher's output into rank, text and event.

    >>> parse_line('[1,3]<stdout>:hello')
    (3, 'hello', None)
    >>> parse_line('mpirun: something')
    (None, 'mpirun: something', None)
    """
    found = TAG.match(line)
    rank = int(found[1]) if found else None
    text = (line[found.end() :] if found else line).rstrip("\r\n")
    if not text.startswith(MARK):
        return rank, text, None
    try:
        fields = json.loads(text[len(MARK) :])
        event = Event(fields.pop("kind"), fields.pop("rank"), fields)
    except (ValueError, KeyError, AttributeError, RecursionError, TypeError):
        return rank, text, None
    return (event.rank, text, event) if _is_whole(event) else (rank, text, None)


def lines_of_ranks(lines: Iterable[str]) -> Iterator[str]:
    r"""Yield the lines that ranks wrote, from those that their launcher put out.

    A launcher passes on what it has just read of a rank, be it half a line, and puts a tag before it. So one
    line of its output may hold pieces of several ranks.

    Args:
        lines: Output of the launcher, each with its newline.

    Yields:
        Lines without newline, with one tag at most, at the beginning. Last come those that were not ended.

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


def _is_whole(event: Event) -> bool:
    """Whether an event has what its readers rely on."""
    wanted = FIELDS.get(event.kind) if isinstance(event.kind, str) else None
    if wanted is None or not isinstance(event.rank, int):
        return False
    return all(isinstance(event.fields.get(name), kind) for name, kind in wanted.items()) and (
        _contents_fit(event)
    )


def _is_target(pair: Any) -> bool:
    is_pair = isinstance(pair, list) and len(pair) == 2
    return is_pair and isinstance(pair[0], str) and isinstance(pair[1], dict)


def _contents_fit(event: Event) -> bool:
    if event.kind == "targets":
        pairs = event.fields["targets"]
        return all(map(_is_target, pairs))
    if event.kind == "pair":
        return len(event.fields["hosts"]) == 2
    metrics = event.fields.get("metrics", {})
    return all(isinstance(value, Number) for value in metrics.values())


def readable(parsed: tuple[int | None, str, Event | None]) -> str | None:
    """Return a parsed line for a person; None for what a person need not see."""
    rank, text, event = parsed
    if event is not None:
        return as_text(event)
    return tagged(rank, text)


def tagged(rank: int | None, text: str) -> str:
    """Return what a rank has said, with its number; None: it is not known who said it."""
    return text if rank is None else f"[rank {rank}] {text}"


def as_text(event: Event) -> str | None:
    """Return an event for a person; None for what a person need not see."""
    write = _TEXTS.get(event.kind)
    return None if write is None else write({**event.fields, "rank": event.rank})


def progress_text(f: Mapping[str, Any]) -> str:
    """Return one line of progress."""
    return (
        f"epoch {f['epoch'] + 1}/{f['num_epochs']}  step {f['step']}/{f['num_steps']}  "
        f"{100 * f['step'] / max(1, f['num_steps']):.0f} %  loss {f['loss']:.4f}  lr {f['lr']:.4g}  "
        f"{f['samples_per_s']:,.0f} samples/s  ETA {duration(f['eta_s'])}"
    )


def summary_lines(f: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that end a run."""
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in f["metrics"].items())
    yield f"trained {f['job']}: {f['epochs']:g} epochs, {f['steps']} steps, {duration(f['seconds'])}"
    yield f"  evaluation      {metrics or 'none'}"
    yield f"  throughput      {f['samples_per_s']:,.0f} samples/s, {f['world_size']} rank(s)"
    yield f"  global batch    {f['global_batch_size']}"
    yield (
        f"  learning rate   {f['lr_scaling']}: base {f['base_lr']:g} at batch "
        f"{f['reference_batch_size']} -> peak {f['peak_lr']:g}"
    )
    yield f"  metrics         {', '.join(f['metrics_addresses']) or 'not served'}"
    yield f"  checkpoint      {f['checkpoint'] or 'none'}"


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


def _evaluation_text(f: Mapping[str, Any]) -> str:
    return f"epoch {f['epoch']}: " + ", ".join(f"{name} {v:.4g}" for name, v in f["metrics"].items())


def _started_text(f: Mapping[str, Any]) -> str:
    ranks = "1 rank" if f["world_size"] == 1 else f"{f['world_size']} ranks"
    return (
        f"{f['job']}: {f['num_parameters']:,} parameters on {ranks}, "
        f"global batch {f['global_batch_size']}, {f['precision']} on {f['device']}"
    )


_TEXTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "started": _started_text,
    "progress": progress_text,
    "evaluation": _evaluation_text,
    "resumed": lambda f: f"resumed from {f['checkpoint']}: epoch {f['epoch']}, step {f['step']}",
    "notice": lambda f: f"rank {f['rank']}: {f['text']}",
    "left": lambda f: f"rank {f['rank']}: asked to leave; saved after step {f['step']}",
    "summary": lambda f: "\n".join(summary_lines(f)),
    "failure": lambda f: f"error: rank {f['rank']} on {f['host']}: {f['message']}",
}
