"""What has happened in a run, from its ``events.jsonl``: read on from where it was left."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from horovod_train.events.file import EVENTS_FILE, Record, as_record
from horovod_train.events.types import (
    Attempt,
    CheckpointWritten,
    Evaluation,
    Event,
    Failure,
    HostsLost,
    Notice,
    Opened,
    Preempted,
    Progress,
    RankTimes,
    Resumed,
    ScriptDone,
    Stalled,
    Started,
    StateChanged,
    Summary,
    Target,
    Targets,
)
from horovod_train.monitor.live import by_rank
from horovod_train.monitor.rank_series import RankSeries
from horovod_train.system.files import open_regular

MAX_POINTS = 2000
MAX_READ_BYTES = 32 * 2**20
MAX_EVENTS = 500
# What a person wants to see marked on a time axis.
MARKED = (
    Attempt, CheckpointWritten, Evaluation, Failure, HostsLost, Notice, Opened, Preempted, Resumed,
    ScriptDone, Stalled, Started, StateChanged, Summary,
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """How far training was at some time; None: that is not known.

    Attributes:
        time_unix_s: When.
        step: Optimizer steps made.
        epochs_begun: Epochs begun, the one under way among them.
        loss: Of the last step.
        lr: Learning rate of it.
        samples_per_s: Samples a second of all ranks.
        numbers: Further numbers of the step by name.
    """

    time_unix_s: float
    step: int
    epochs_begun: int | None
    loss: float | None
    lr: float | None
    samples_per_s: float | None
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass
class History:
    """What has happened in one run so far.

    Attributes:
        started: What its last ranks train; None: they have not begun.
        world_size_wanted: Ranks that its last attempt was to have; None: unknown.
        num_attempts: How often its ranks were started.
        num_preemptions: How often they were preempted, and saved.
        hosts_lost: Hosts that were lost, counted each time.
        targets: Where its ranks serve metrics, by rank.
        points: How far training was, the oldest first, thinned.
        last: Last progress; None: no step was reported yet.
        num_steps: Steps it is to make, as last told; 0: not known.
        num_epochs: Epochs it is to make, as last told; 0: not known.
        loss_is_local: The loss is that of rank 0's samples alone, as of a script.
        ranks: Where the time of ranks went.
        metrics: Its last evaluation.
        checkpoint_unix_s: When the last checkpoint was written; None: there is none.
        checkpoint_error: Why the last one could not be written; empty: it was.
        failures: Why ranks failed, in this start of the run.
        ended: Ranks whose script has ended well, in this start of the run.
        summary: How it ended; None: it has not, or not well.
        events: What a person wants to see marked, the newest last.
        counts: Events by kind.
    """

    started: Started | None = None
    world_size_wanted: int | None = None
    num_attempts: int = 0
    num_preemptions: int = 0
    hosts_lost: list[str] = field(default_factory=list)
    targets: dict[int, Target] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    last: Point | None = None
    num_steps: int = 0
    num_epochs: int = 0
    loss_is_local: bool = False
    ranks: RankSeries = field(default_factory=RankSeries)
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint_unix_s: float | None = None
    checkpoint_error: str = ""
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    summary: Summary | None = None
    events: deque[Record] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    counts: Counter[str] = field(default_factory=Counter)
    begun_unix_s: float | None = None
    _is_preempted: bool = False

    def add(self, record: Record) -> None:
        """Take the next event."""
        event = record.event
        self.counts[event.kind] += 1
        if self.begun_unix_s is None:
            self.begun_unix_s = record.time_unix_s
        if isinstance(event, MARKED) and not (isinstance(event, ScriptDone) and record.rank):
            self.events.append(record)
        self._measure(record.time_unix_s, event)
        self._begin(event)
        self._end(record.rank or 0, event)

    def _measure(self, time_unix_s: float, event: Event) -> None:
        """Take an event that measures something."""
        match event:
            case Progress():
                self._add_progress(time_unix_s, event)
            case RankTimes():
                self.ranks.add_event(time_unix_s, event)
            case Evaluation():
                self.metrics = dict(event.metrics)
            case CheckpointWritten():
                self.checkpoint_error = event.error
                if not event.error:
                    self.checkpoint_unix_s = time_unix_s
            case Summary():
                self.summary, self.metrics = event, dict(event.metrics)
                if self.last is None or self.last.step != event.steps:  # nothing was left to train
                    self.last = Point(time_unix_s, event.steps, None, None, None, None)

    def _end(self, rank: int, event: Event) -> None:
        """Take an event with which something ends."""
        match event:
            case HostsLost():
                self.hosts_lost += event.hosts
            case Failure():
                self.failures.append((rank, event))
            case Preempted():
                self._note_preempted()
            case ScriptDone():
                self.ended.add(rank)

    def _begin(self, event: Event) -> None:
        """Take an event with which something begins."""
        match event:
            case Opened():
                self.summary = None
                self._begin_attempt()
            case Attempt():
                self.num_attempts += 1
                self.world_size_wanted = event.num_wanted
                self._begin_attempt()
            case Started():
                self.started = event
                self.ranks.begin(event.world_size)
            case Targets():
                self.targets |= by_rank(event.targets)

    def _begin_attempt(self) -> None:
        self.targets, self.failures, self.ended = {}, [], set()
        self._is_preempted = False

    def _note_preempted(self) -> None:
        """Count an attempt that was preempted, however many of its ranks say so."""
        if not self._is_preempted:
            self._is_preempted = True
            self.num_preemptions += 1

    def _add_progress(self, time_unix_s: float, event: Progress) -> None:
        self.num_steps, self.num_epochs = event.num_steps, event.num_epochs
        self.loss_is_local = event.loss_is_local
        epochs_begun = event.epoch + 1 if event.num_epochs else None
        speed, numbers = event.samples_per_s, event.numbers
        self.add_point(Point(time_unix_s, event.step, epochs_begun, event.loss, event.lr, speed, numbers))

    def add_point(self, point: Point) -> None:
        """Take how far training is."""
        self.last = point
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            self.points = [*self.points[:-1:2], self.points[-1]]

    @property
    def cause(self) -> str:
        """What kind of failure it was by the word of its ranks; empty: none has said."""
        causes = [failure.cause for _, failure in self.failures if failure.is_cause]
        return next(filter(None, causes), "")

    @property
    def has_terminal_event(self) -> bool:
        """Whether ranks have told how the last attempt ended."""
        return self.summary is not None or bool(self.failures) or self._is_preempted or self.scripts_ended

    @property
    def scripts_ended(self) -> bool:
        """Whether the script has ended well on every rank."""
        return bool(self.ended) and len(self.ended) >= (self.world_size_wanted or 1)


class HistoryReader:
    """Reads the history of a run, and on from there.

    Args:
        log_dir: Folder of the run.
        last_bytes: Begin with the last so many bytes; None: at the beginning.
        with_ranks: Know where the time of each rank went; without it, a history takes little memory.
    """

    def __init__(self, log_dir: Path, last_bytes: int | None = None, *, with_ranks: bool = True) -> None:
        self.log_dir = log_dir
        self.history = History()
        self._path = log_dir / EVENTS_FILE
        self._identity: tuple[int, int] | None = None
        self._at_bytes = 0
        self._last_bytes = last_bytes
        self._with_ranks = with_ranks
        self._reading = Lock()  # of two who read at the same time both would count what is new

    def read_on(self) -> History:
        """Read what has come since; a file that is not there or cannot be read has nothing new."""
        with self._reading:
            return self._read_on()

    def _read_on(self) -> History:
        try:
            found = self._path.stat()
            identity = (found.st_dev, found.st_ino)
            if identity != self._identity or found.st_size < self._at_bytes:
                # It was rewritten, with fewer lines.
                begin = 0 if self._last_bytes is None else max(0, found.st_size - self._last_bytes)
                self._identity, self._at_bytes, self.history = identity, begin, History()
            if found.st_size > self._at_bytes:
                self._read_from(self._at_bytes)
        except OSError:
            pass
        return self.history

    def _read_from(self, at_bytes: int) -> None:
        with open_regular(self._path) as file:
            file.seek(at_bytes)
            data = file.read(MAX_READ_BYTES)
        whole, _, rest = data.rpartition(b"\n")
        # A line this long is not an event.
        self._at_bytes = at_bytes + len(data) - (len(rest) if len(rest) < MAX_READ_BYTES else 0)
        for record in parsed(
            whole.decode("utf-8", errors="replace").split("\n"), with_ranks=self._with_ranks
        ):
            self.history.add(record)


def parsed(lines: Iterable[str], *, with_ranks: bool = True) -> Iterator[Record]:
    """Yield what lines of the file say, as far as this version knows it."""
    for line in lines:
        if not with_ranks and f'"{RankTimes.kind}"' in line:
            continue
        try:
            yield as_record(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue


def as_json(record: Record) -> dict[str, object]:
    """Return a record as plain JSON; numbers that are not finite become null, which browsers can read."""
    fields = json.loads(record.event.model_dump_json())
    return {"time_unix_s": record.time_unix_s, "rank": record.rank, "kind": record.event.kind, **fields}
