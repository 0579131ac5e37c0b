"""Conversion of events to lines of output, and parsing of the output of launchers and ranks.

A worker of ``horovod-train run`` writes events as marked JSON lines to the channel of the run
(``channel.py``), or else to its output. A worker that was started manually writes them as text.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TextIO

from horovod_train.events.channel import ChannelWriter
from horovod_train.events.file import EventsFile
from horovod_train.events.text import as_text, tagged
from horovod_train.events.types import KINDS, Event

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
    """

    rank: int
    as_json: bool
    stream: TextIO | None = field(default_factory=lambda: sys.stdout)
    file: EventsFile | None = None
    channel: ChannelWriter | None = None
    observers: list[Callable[[Event], None]] = field(default_factory=list)
    exit_code: int | None = None
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
