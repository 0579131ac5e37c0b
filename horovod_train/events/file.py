"""``events.jsonl``: the events of a run for programs, one per line, oldest first.

Each line is a JSON object with ``time_unix_s``, ``rank`` (null: the launcher), ``kind``, and the fields of
that kind (``types.py``). The size of the file is limited: before a line would exceed the limit, every second
line of the most frequent kind (usually progress) is removed. This repeats until the file is half full.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import time

from horovod_train import __version__
from horovod_train.events.types import KINDS, MAX_RANKS, Event, Notice, Opened
from horovod_train.system.files import LogFile, write_atomic

EVENTS_FILE = "events.jsonl"
FORMAT_VERSION = 1
MAX_BYTES = 16 * 2**20
MAX_UNIX_S = 1 << 40


def opened(job: str, run_id: str) -> Opened:
    """Return the first event of a start of a run."""
    return Opened(format_version=FORMAT_VERSION, package_version=__version__, job=job, run_id=run_id)


@dataclass(frozen=True)
class Record:
    """A line of the file.

    Attributes:
        time_unix_s: Time at which the line was written, by the clock of the host that wrote it.
        rank: Rank that reported the event; None: the launcher.
        event: The event.
    """

    time_unix_s: float
    rank: int | None
    event: Event


class EventsFile:
    """Writer of an events file. If the disk is full, events are lost, and the job continues.

    Args:
        path: The file; events of earlier starts of the run are retained.
        on_loss: Called with a description of the problem when events are lost, once per problem.
        max_bytes: Upper limit of the size of the file.
        clock: Function that returns seconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        on_loss: Callable[[str], None] = lambda _: None,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._clock = clock
        self._on_loss = on_loss
        self._log = LogFile(path, self._note_problem, self._describe_loss)
        self._size_bytes = path.stat().st_size if path.exists() else 0
        self._lock = Lock()
        self._problem = ""
        self._problems: set[str] = set()

    def write(self, event: Event, rank: int | None = None) -> None:
        """Append an event; thread-safe."""
        line = self._as_line(event, rank)
        with self._lock:
            if self._size_bytes + len(line) < self._max_bytes or self._make_room_for(line):
                self._log.write(line)
                self._size_bytes += len(line) + 1
            problem, self._problem = self._problem, ""
        # Called without the lock because the callback may write an event.
        if problem and problem not in self._problems:
            self._problems.add(problem)
            self._on_loss(problem)

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def _as_line(self, event: Event, rank: int | None) -> str:
        # The line is ASCII, so its length in characters is its size in bytes.
        return json.dumps(
            {"time_unix_s": self._clock(), "rank": rank, "kind": event.kind, **event.model_dump()}
        )

    def _note_problem(self, problem: str) -> None:
        self._problem = problem

    def _describe_loss(self, num_lines: int) -> str:
        return self._as_line(Notice(text=f"{num_lines} events could not be written"), None)

    def _make_room_for(self, line: str) -> bool:
        if len(line) >= self._max_bytes // 2:
            self._problem = f"{self._path.name} is incomplete: an event has {len(line)} bytes"
            return False
        self._log.close()
        try:
            # A damaged file may contain bytes that are not ASCII; they are retained, escaped.
            text = self._path.read_text(encoding="ascii", errors="backslashreplace")
            lines = thinned(text.splitlines(), self._max_bytes // 2)
            write_atomic(self._path, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            self._problem = f"{self._path.name} is incomplete: {error.strerror}"
            return False
        self._size_bytes = sum(len(line) + 1 for line in lines)
        return self._size_bytes <= self._max_bytes // 2


def thinned(lines: list[str], max_bytes: int) -> list[str]:
    """Remove every second line of the most frequent kind, repeatedly, until the lines fit into a size.

    The first and last lines of a kind are retained as long as there are others of that kind.
    """
    kinds = [_kind_of(line) for line in lines]
    while sum(len(line) + 1 for line in lines) > max_bytes and lines:
        most, _ = Counter(kinds).most_common(1)[0]
        places = [place for place, kind in enumerate(kinds) if kind == most]
        dropped = set(places[1:-1:2] or places[:1])
        lines = [line for place, line in enumerate(lines) if place not in dropped]
        kinds = [kind for place, kind in enumerate(kinds) if place not in dropped]
    return lines


def read_events(path: Path) -> Iterator[Record]:
    """Yield the events of a file, which may be written concurrently; skip events of unsupported kinds.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from parsed_records(file)


def parsed_records(lines: Iterable[str]) -> Iterator[Record]:
    """Yield the events in lines of the file; skip incomplete lines, and those of another version."""
    for line in lines:
        try:
            yield as_record(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue


def as_record(line: str) -> Record:
    """Parse a line of the file.

    Raises:
        ValueError: The line is incomplete or of another version; also KeyError, TypeError or RecursionError.
    """
    fields = json.loads(line)
    event = KINDS[fields["kind"]].model_validate_json(line)
    time_unix_s, rank = fields["time_unix_s"], fields["rank"]
    if not 0 <= time_unix_s < MAX_UNIX_S or not (rank is None or 0 <= rank < MAX_RANKS):
        raise ValueError("time or rank out of range")
    return Record(float(time_unix_s), rank, event)


def _kind_of(line: str) -> str:
    """Return the kind of a line, with the first rank of events that contain a range of ranks."""
    try:
        fields = json.loads(line)
        return f"{fields['kind']} {fields.get('first_rank', '')}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
