"""Events as lines, and back: what a launcher and its ranks put out, line by line.

Started by ``horovod-train run``, a worker writes events as marked JSON lines into the channel of the run
(``channel.py``), or to its output where it has none, and ``run`` shows them. Started manually, it writes the
same events as text. Nothing else about a worker depends on who started it.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TextIO

from horovod_train.events.channel import ChannelWriter
from horovod_train.events.file import EventsFile
from horovod_train.events.text import as_text, tagged
from horovod_train.events.types import KINDS, Event

MARK = "@horovod-train "
# Launchers put a tag before each piece of output: "[1,0]<stdout>:" (mpirun), "[0]<stdout>:" (Gloo). What
# follows is the piece, even if it begins with a space.
TAG = re.compile(r"\[(?:\d+,)?(\d+)\]<std(?:out|err)>:")
_ANY_TAG = re.compile(r"(\[(?:\d+,)?\d+\]<std(?:out|err)>:)")


@dataclass(frozen=True)
class Line:
    """One line of a launcher's output.

    Attributes:
        raw: As it came.
        rank: Who wrote it; None: the launcher, or it is not known.
        text: What was written, without the launcher's tag.
        event: The event that the text stands for; None: it stands for itself.
        is_launchers: Whether the launcher has said it itself.
    """

    raw: str
    rank: int | None
    text: str
    event: Event | None = None
    is_launchers: bool = False

    @property
    def is_tagged(self) -> bool:
        """Whether the launcher has said whose line it is."""
        return TAG.match(self.raw) is not None

    def readable(self) -> str | None:
        """Return the line for a person; None for what a person need not see."""
        return tagged(self.rank, self.text) if self.event is None else as_text(self.event, self.rank or 0)


@dataclass
class Reporter:
    """Writes the events of one rank.

    Attributes:
        rank: This rank.
        as_json: For another program instead of a person.
        stream: Output; None: events are not written there.
        file: Where to as well; None: nowhere else.
        channel: Where to in place of the stream, as JSON; None: there is none.
    """

    rank: int
    as_json: bool
    stream: TextIO | None = field(default_factory=lambda: sys.stdout)
    file: EventsFile | None = None
    channel: ChannelWriter | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, event: Event) -> None:
        """Write an event in one piece, so that launchers do not tear it apart; from any thread."""
        if self.file is not None:
            self.file.write(event, self.rank)
        text = to_line(event, self.rank) if self.as_json else as_text(event, self.rank)
        if text is None or self.stream is None:
            return
        with self._lock:
            if self.channel is not None and self.as_json:
                try:
                    self.channel.write(text)
                except OSError:
                    pass  # the disk is full, or the folder is gone: the output is left
                else:
                    return
            self.stream.write(text + "\n")
            self.stream.flush()


def to_line(event: Event, rank: int) -> str:
    """Return an event for another program."""
    return MARK + json.dumps({"kind": event.kind, "rank": rank, **event.model_dump()})


def parse_line(raw: str) -> Line:
    """Return what a line of a launcher's output says, and who.

    >>> parse_line('[1,3]<stdout>:hello').rank
    3
    >>> parse_line('mpirun: something').rank is None
    True
    """
    found = TAG.match(raw)
    rank = int(found[1]) if found else None
    text = (raw[found.end() :] if found else raw).rstrip("\r\n")
    if text.startswith(MARK):
        try:
            return Line(raw, *_parse_event(text.removeprefix(MARK), text))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # a task has written what looks like an event
    return Line(raw, rank, text, is_launchers=rank is None)


def split_at_event(raw: str) -> list[str]:
    r"""Return a line; one in which an event follows an unfinished line of the task, as two.

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
