"""Events in files: ``events.jsonl`` of a run, and transfer of events from ranks to the launcher or agent.

    ChannelWriter, ChannelReader   transfer of events, in files of the stage folder on each host
    EventsFile                     writer of ``events.jsonl``
    read_events, parsed_records    readers of it
    series_of                      series of steps and evaluations
    places_to_keep, thinned        thinning of curves to the points that show what all of them show

``events.jsonl`` contains the events of a run for programs, one per line, oldest first. Each line is a JSON
object with ``time_unix_s``, ``rank`` (null: the launcher), ``kind``, and the fields of that kind
(``types.py``). Readers parse the whole file, so that its size and the number of its lines are limited.

    rank: ChannelWriter -- <stage folder>/events-<pid>-<number>.jsonl --> launcher or agent: ChannelReader
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from threading import Lock
from time import monotonic, time
from typing import Any

from horovod_train.events.types import KINDS, MAX_RANKS, Evaluation, Event, Notice, Opened, Progress
from horovod_train.system.files import LogFile, open_regular, read_regular, write_atomic
from horovod_train.version import __version__

MAX_FILE_BYTES = 2**20
MAX_READ_BYTES = 2**20
"""A call of ``ChannelReader.read`` opens no further file after this number of bytes."""


class ChannelWriter:
    """Writer of the events of this process, in the stage folder (``LaunchRequest.stage``).

    Events are separate from the output of ranks, which may block or end in an unfinished line. Each file
    has one writer. The writer starts a new file when the current file is large, so that the reader may
    delete old files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0
        self._handle = -1
        self._number = 0
        self._size_bytes = 0

    def write(self, line: str) -> None:
        """Append a line.

        Raises:
            OSError: The line cannot be written, or only a part of it.
        """
        if self._pid != os.getpid() or self._size_bytes >= MAX_FILE_BYTES:
            self._open_next()
        data = f"{line}\n".encode(errors="backslashreplace")
        while data:
            try:
                written = os.write(self._handle, data)
            except OSError:
                self._size_bytes = MAX_FILE_BYTES  # a part of this line is written: the next starts a file
                raise
            self._size_bytes += written
            data = data[written:]

    def _open_next(self) -> None:
        name = f"events-{os.getpid()}-{self._number + 1:09}.jsonl"
        handle = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.close()
        self._handle, self._pid, self._number, self._size_bytes = handle, os.getpid(), self._number + 1, 0

    def close(self) -> None:
        """Close the file; the next line starts another file."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self._pid = -1, 0


class ChannelReader:
    """Reader of the events of all processes of a run on this host; returns each event once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: defaultdict[str, int] = defaultdict(int)

    def read(self) -> list[str]:
        """Return lines that were written since the last call, about MAX_READ_BYTES at most."""
        lines: list[str] = []
        size_bytes = 0
        files = sorted(self._folder.glob("events-*.jsonl"))
        for file, following in zip_longest(files, files[1:]):
            if size_bytes >= MAX_READ_BYTES:
                break
            with suppress(OSError):
                with file.open("rb") as stream:
                    stream.seek(self._offsets[file.name])
                    data = stream.read()
                whole = data[: data.rfind(b"\n") + 1]
                lines += whole.decode(errors="replace").splitlines()
                size_bytes += len(whole)
                self._offsets[file.name] += len(whole)
                # The writer's next file was listed before this file was read, so this file is complete.
                if following is not None and _pid_of(following) == _pid_of(file):
                    file.unlink()
                    del self._offsets[file.name]
        return lines


def _pid_of(file: Path) -> str:
    return file.name.split("-")[1]


def channel_of(environ: Mapping[str, str]) -> ChannelWriter | None:
    """Return the channel of a rank that ``horovod-train run`` has started; None for other ranks."""
    folder = environ.get("HOROVOD_TRAIN_RUN")
    return ChannelWriter(Path(folder)) if folder is not None else None


Series = dict[str, list[tuple[int, float]]]
"""Values of each metric as (completed steps, value), in ascending order of steps."""


def series_of(events: Iterable[Event]) -> Series:
    """Return ``loss``, ``lr``, ``samples_per_s`` and further numbers of steps, and ``eval/<metric>``.

    After a return to a checkpoint, values of steps that were repeated are the new ones.
    """
    series: Series = {}
    step = 0
    for event in events:
        if isinstance(event, Progress):
            step = event.step
            known = {"loss": event.loss, "lr": event.lr, "samples_per_s": event.samples_per_s}
            _add(series, step, {**known, **event.numbers})
        elif isinstance(event, Evaluation):
            values = {f"eval/{name}": value for name, value in event.metrics.items()}
            _add(series, step if event.step is None else event.step, values)
    return series


def _add(series: Series, step: int, values: Mapping[str, float | None]) -> None:
    """Add values of a step; earlier values of the same or of later steps are replaced."""
    for name, value in values.items():
        if value is None:
            continue
        points = series.setdefault(name, [])
        while points and points[-1][0] >= step:
            points.pop()
        points.append((step, value))


def places_to_keep(
    positions: Sequence[float], values: Sequence[Mapping[str, float | None]], max_points: int
) -> list[int]:
    """Return the places of at most ``max_points`` points (at least the first and the last one), ascending.

    The axis is divided into intervals of equal width, with narrower ones near 0. Each keeps its first point
    and, of each series, the smallest and the largest value, and both ends of its largest rise and fall. The
    width is the smallest power of two for which the points are few enough: if a curve that was thinned before
    is continued and thinned again, old and new parts have the same resolution. If intervals are of no use, as
    after a clock that was wrong, every n-th point is kept.

    Args:
        positions: Position of each point on the axis. Where it decreases, another curve begins.
        values: Values of each point by series; None and numbers that are not finite are omitted.
        max_points: Largest number of points.
    """
    if len(positions) <= max_points:
        return list(range(len(positions)))
    from horovod_train.events.intervals import places_of_intervals  # imports NumPy

    return places_of_intervals(positions, values, max_points)


EVENTS_FILE = "events.jsonl"
FORMAT_VERSION = 1
MAX_BYTES = 16 * 2**20
MAX_LINES = 20_000
RETRY_S = 60.0
"""Time after which a file is thinned out again if that failed, as on a full disk."""
MAX_UNIX_S = 1 << 40


def opened(job: str, run_id: str) -> Opened:
    """Return the first event of a start of a run."""
    return Opened(format_version=FORMAT_VERSION, package_version=__version__, job=job, run_id=run_id)


NOT_FINITE = "not_finite"
"""Field of lines of the HTTP API with the numbers that JSON does not have."""


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

    Before a line would exceed the limit of the file's size, lines of the most frequent kind (usually
    progress) are thinned out until the file is half full. The number of lines is limited, too.

    Args:
        path: The file; events of earlier starts of the run are retained.
        on_loss: Called with a description of the problem when events are lost, once per problem.
        max_bytes: Upper limit of the size of the file.
        max_lines: Upper limit of the number of its lines.
        clock: Function that returns seconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        on_loss: Callable[[str], None] = lambda _: None,
        max_bytes: int = MAX_BYTES,
        max_lines: int = MAX_LINES,
        clock: Callable[[], float] = time,
    ) -> None:
        self._path = path
        self._max_bytes, self._max_lines = max_bytes, max_lines
        self._clock = clock
        self._on_loss = on_loss
        self._log = LogFile(path, self._note_problem, self._describe_loss)
        self._size_bytes, self._num_lines = _size_of(path)
        self._lock = Lock()
        self._next_try_s = 0.0
        self._problem = ""
        self._problems: set[str] = set()

    def write(self, event: Event, rank: int | None = None) -> None:
        """Append an event; thread-safe."""
        line = self._as_line(event, rank)
        with self._lock:
            has_room = self._size_bytes + len(line) < self._max_bytes and self._num_lines < self._max_lines
            if has_room or self._make_room_for(line):
                self._log.write(line)
                self._size_bytes += len(line) + 1
                self._num_lines += 1
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
        if monotonic() < self._next_try_s:
            return False
        self._log.close()
        try:
            # A damaged file may contain bytes that are not ASCII; they are retained, escaped.
            text = self._path.read_text(encoding="ascii", errors="backslashreplace")
            lines = thinned(text.splitlines(), self._max_bytes // 2, self._max_lines // 2)
            write_atomic(self._path, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            self._problem = f"{self._path.name} is incomplete: {error.strerror}"
            self._next_try_s = monotonic() + RETRY_S
            return False
        self._size_bytes, self._num_lines = sum(len(line) + 1 for line in lines), len(lines)
        return self._size_bytes <= self._max_bytes // 2


@dataclass(frozen=True)
class _Line:
    """A line as a point of a curve: of a kind, at a position, with values by series."""

    text: str
    kind: str
    position: float
    values: Mapping[str, float | None]

    @classmethod
    def of(cls, text: str) -> _Line:
        """Parse a line; one that is not an event has the kind ""."""
        try:
            fields = json.loads(text)
            kind, position, values = fields["kind"], fields["time_unix_s"], dict[str, float | None]()
            if kind == Progress.kind:
                position, numbers = fields["step"], fields.get("numbers") or {}
                values = {name: fields.get(name) for name in ("loss", "lr", "samples_per_s")} | numbers
            # The ranks of a large job are reported by several events.
            return cls(text, f"{kind} {fields.get('first_rank', '')}", float(position), values)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls(text, "", 0.0, {})


def thinned(texts: Sequence[str], max_bytes: int, max_lines: int = MAX_LINES) -> list[str]:
    """Thin out lines of the most frequent kinds to one half, repeatedly, until the lines are few enough.

    The first and last lines of a kind are retained as long as there are others of that kind.
    """
    lines = [_Line.of(text) for text in texts]
    places_of: dict[str, list[int]] = {}
    for place, line in enumerate(lines):
        places_of.setdefault(line.kind, []).append(place)
    num_lines, num_bytes = len(lines), sum(len(line.text) + 1 for line in lines)
    while places_of and (num_lines > max_lines or num_bytes > max_bytes):
        most = max(map(len, places_of.values()))
        for kind in [kind for kind, places in places_of.items() if len(places) == most]:
            if num_lines <= max_lines and num_bytes <= max_bytes:
                break
            before = places_of.pop(kind)
            if kept := _half(lines, before):
                places_of[kind] = kept
            num_lines -= len(before) - len(kept)
            num_bytes -= sum(len(lines[i].text) + 1 for i in set(before).difference(kept))
    return [lines[place].text for place in sorted(place for places in places_of.values() for place in places)]


def _half(lines: Sequence[_Line], places: list[int]) -> list[int]:
    if len(places) <= 2:
        return places[1:]
    positions, values = [lines[i].position for i in places], [lines[i].values for i in places]
    return [places[i] for i in places_to_keep(positions, values, max(2, len(places) // 2))]


def _size_of(path: Path) -> tuple[int, int]:
    """Return the number of bytes and of lines of a file; (0, 0): it does not exist."""
    try:
        with open_regular(path) as file:
            sizes = [(len(block), block.count(b"\n")) for block in iter(lambda: file.read(2**20), b"")]
    except OSError:
        return 0, 0
    return sum(size for size, _ in sizes), sum(lines for _, lines in sizes)


def read_events(path: Path) -> Iterator[Record]:
    """Yield the events of a file, which may be written concurrently; skip events of unsupported kinds.

    Raises:
        OSError: The file cannot be read, or is larger than an events file may be.
    """
    text = read_regular(path, 2 * MAX_BYTES).decode(errors="replace")
    yield from parsed_records(text.split("\n"))


def parsed_records(lines: Iterable[str]) -> Iterator[Record]:
    """Yield the events in lines of the file; skip incomplete lines, and those of another version."""
    for line in lines:
        try:
            yield as_record(line)
        except (ValueError, LookupError, TypeError, RecursionError):
            continue


def as_json(line: str) -> str:
    """Return a line of the file as JSON for other languages: null in place of NaN and infinity.

    The field ``not_finite`` has the places and values of these numbers.

    >>> as_json('{"kind": "evaluation", "metrics": {"loss": NaN}}')
    '{"kind": "evaluation", "metrics": {"loss": null}, "not_finite": [["metrics", "loss", "nan"]]}'
    """
    if "NaN" not in line and "Infinity" not in line:
        return line
    found: list[list[str | int]] = []
    try:
        document = _without_constants(json.loads(line), [], found)
    except (ValueError, RecursionError):  # an incomplete line
        return line
    return json.dumps({**document, NOT_FINITE: found}) if isinstance(document, dict) and found else line


def _without_constants(value: object, place: list[str | int], found: list[list[str | int]]) -> object:
    """Return a value with None for numbers that are not finite, and add their places to ``found``."""
    if isinstance(value, float) and not math.isfinite(value):
        found.append([*place, str(value)])
        return None
    if isinstance(value, dict):
        return {key: _without_constants(each, [*place, key], found) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_constants(each, [*place, number], found) for number, each in enumerate(value)]
    return value


def _with_constants(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a line of ``as_json`` with its numbers that are not finite."""
    for *place, last, value in fields.pop(NOT_FINITE):
        at: Any = fields
        for part in place:
            at = at[part]
        at[last] = float(value)
    return fields


def as_record(line: str) -> Record:
    """Parse a line of the file.

    Raises:
        ValueError: The line is incomplete or of another version; also LookupError, TypeError, RecursionError.
    """
    fields = json.loads(line)
    if NOT_FINITE in fields:
        line = json.dumps(_with_constants(fields))
    event = KINDS[fields["kind"]].model_validate_json(line)
    time_unix_s, rank = fields["time_unix_s"], fields["rank"]
    if not 0 <= time_unix_s < MAX_UNIX_S or not (rank is None or 0 <= rank < MAX_RANKS):
        raise ValueError("time or rank out of range")
    return Record(float(time_unix_s), rank, event)
