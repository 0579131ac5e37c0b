"""History of a run.

    History, HistoryReader   the state of a run, and its incremental reader
    read_recent              the history from the last events of a run
    summary_lines            progress and slow ranks of a run, as lines for a terminal

The history is read incrementally from ``events.jsonl`` of the run.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from time import time
from typing import TypeVar

from horovod_train.events.file import EVENTS_FILE, Record, parsed_records, places_to_keep
from horovod_train.events.types import (
    Attempt,
    CheckpointWritten,
    ComparedWithOneProcess,
    Evaluation,
    Event,
    Failure,
    Hang,
    HostsLost,
    LossSpike,
    Notice,
    Opened,
    Preempted,
    Progress,
    RankTimes,
    Restart,
    Resumed,
    ScriptDone,
    Stalled,
    Started,
    StateChanged,
    Summary,
    Target,
    Targets,
)
from horovod_train.events.wire import duration
from horovod_train.monitor.live import MIN_WINDOW_S, RankSeries, by_rank, stragglers
from horovod_train.system.files import open_regular

Kind = TypeVar("Kind")

MAX_POINTS = 4000
MAX_READ_BYTES = 32 * 2**20
"""Largest part of a file that is read at once; an events file is smaller."""
MAX_EVENTS = 500
# Events that are marked on a time axis.
MARKED = frozenset({
    Attempt, CheckpointWritten, Evaluation, Failure, Hang, HostsLost, LossSpike, Notice, Opened,
    Preempted, Restart, Resumed, ScriptDone, Stalled, Started, StateChanged, Summary,
})  # fmt: skip


@dataclass(frozen=True)
class Point:
    """Progress of training at one time; None: unknown.

    ``step`` is the number of completed optimizer steps. ``epochs_begun`` includes the current epoch. Loss,
    learning rate and further numbers are those of the last step. The throughput is that of all ranks.
    """

    time_unix_s: float
    step: int
    epochs_begun: int | None
    loss: float | None
    lr: float | None
    samples_per_s: float | None
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float | None]:
        """Values by series."""
        return {"loss": self.loss, "lr": self.lr, "samples_per_s": self.samples_per_s, **self.numbers}


@dataclass
class History:
    """State of a run, accumulated from its events.

    Attributes:
        started: Last start of training; None: training has not started.
        world_size_desired: Ranks requested for the last attempt; None: unknown.
        num_preemptions: Number of attempts that were preempted, with a checkpoint.
        hosts_lost: Lost hosts; a host that is lost several times is contained several times.
        targets: Metrics endpoints of the current attempt, by rank.
        points: Progress over time, oldest first, thinned out to half of ``MAX_POINTS`` when there are more.
        last: Last progress; None: no step was reported.
        num_steps: Last reported total number of steps; 0: unknown.
        num_epochs: Last reported total number of epochs; 0: unknown.
        loss_is_local: Whether the loss is that of rank 0's samples only, as in scripts.
        evaluations: Time, completed steps and metrics of each evaluation, oldest first, thinned out like
            ``points``.
        metrics: Last evaluation.
        checkpoint_unix_s: Time at which the last checkpoint was written; None: there is none.
        checkpoint_path: Path of the last checkpoint; empty: there is none.
        checkpoint_error: Error of the last checkpoint; empty: it was written.
        failures: Rank and failure of each failed rank of the current attempt.
        ended: Ranks of the current attempt whose script has exited with code 0.
        summary: Summary of the completed training; None: training is not complete.
        events: Last events of the kinds ``MARKED``, newest last.
        counts: Number of events by kind.
        begun_unix_s: Time of the first event; None: there is none.
    """

    started: Started | None = None
    world_size_desired: int | None = None
    num_attempts: int = 0
    num_preemptions: int = 0
    hosts_lost: list[str] = field(default_factory=list)
    targets: dict[int, Target] = field(default_factory=dict)
    compared: ComparedWithOneProcess | None = None
    points: list[Point] = field(default_factory=list)
    last: Point | None = None
    num_steps: int = 0
    num_epochs: int = 0
    loss_is_local: bool = False
    ranks: RankSeries = field(default_factory=RankSeries)
    evaluations: list[tuple[float, int, Mapping[str, float]]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint_unix_s: float | None = None
    checkpoint_path: str = ""
    checkpoint_error: str = ""
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    summary: Summary | None = None
    events: deque[Record] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    counts: Counter[str] = field(default_factory=Counter)
    begun_unix_s: float | None = None
    _is_preempted: bool = False

    def add(self, record: Record) -> None:
        """Add the next event."""
        event = record.event
        self.counts[event.kind] += 1
        if self.begun_unix_s is None:
            self.begun_unix_s = record.time_unix_s
        if type(event) in MARKED and not (isinstance(event, ScriptDone) and record.rank):
            self.events.append(record)
        self._measure(record.time_unix_s, event)
        self._begin(event)
        self._end(record.rank or 0, event)

    def _measure(self, time_unix_s: float, event: Event) -> None:
        """Add an event that contains measurements."""
        match event:
            case Progress():
                self._add_progress(time_unix_s, event)
            case RankTimes():
                self.ranks.add_event(time_unix_s, event)
            case Evaluation():
                self.metrics = dict(event.metrics)
                known = self.last.step if self.last is not None else 0
                step = known if event.step is None else event.step
                self.evaluations.append((time_unix_s, step, event.metrics))
                if len(self.evaluations) > MAX_POINTS:
                    steps, values = (
                        [each[1] for each in self.evaluations],
                        [each[2] for each in self.evaluations],
                    )
                    self.evaluations = _kept(self.evaluations, steps, values)
            case CheckpointWritten():
                self.checkpoint_error = event.error
                if not event.error:
                    self.checkpoint_unix_s, self.checkpoint_path = time_unix_s, event.path
            case ComparedWithOneProcess():
                self.compared = event
            case Summary():
                self.summary, self.metrics = event, dict(event.metrics)
                if self.last is None or self.last.step != event.steps:  # resumed at the end: no progress
                    self.last = Point(time_unix_s, event.steps, None, None, None, None)

    def _end(self, rank: int, event: Event) -> None:
        """Add an event that reports an end, or lost hosts."""
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
        """Add an event that reports a start."""
        match event:
            case Opened():
                self.summary = None
                self._begin_attempt()
            case Attempt():
                self.num_attempts += 1
                self.world_size_desired = event.num_wanted
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
        """Count a preempted attempt once, because each of its ranks reports the preemption."""
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
        """Add the current progress."""
        self.last = point
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            steps, values = [each.step for each in self.points], [each.values for each in self.points]
            self.points = _kept(self.points, steps, values)

    @property
    def cause(self) -> str:
        """Cause of the failure as reported by the ranks of the current attempt; empty: none was reported."""
        causes = [failure.cause for _, failure in self.failures if failure.is_cause]
        return next(filter(None, causes), "")

    @property
    def has_terminal_event(self) -> bool:
        """Whether ranks have reported how the current attempt ended."""
        return self.summary is not None or bool(self.failures) or self._is_preempted or self.scripts_ended

    @property
    def scripts_ended(self) -> bool:
        """Whether the script has exited with code 0 on every rank."""
        return bool(self.ended) and len(self.ended) >= (self.world_size_desired or 1)


def _kept(
    points: Sequence[Kind], steps: Sequence[int], values: Sequence[Mapping[str, float | None]]
) -> list[Kind]:
    return [points[place] for place in places_to_keep(steps, values, MAX_POINTS // 2)]


class HistoryReader:
    """Incremental reader of the history of a run. Threads may call ``update`` concurrently.

    Args:
        log_dir: Run folder.
        last_bytes: The first read starts this many bytes before the end of the file; None: at its start, if
            the file is not larger than an events file may be.
        with_ranks: Whether to read the times of each rank. Without them, a history needs little memory.
    """

    def __init__(self, log_dir: Path, last_bytes: int | None = None, *, with_ranks: bool = True) -> None:
        self.log_dir = log_dir
        self.history = History()
        self._path = log_dir / EVENTS_FILE
        self._identity: tuple[int, int] | None = None
        self._at_bytes = 0
        self._last_bytes = last_bytes
        self._with_ranks = with_ranks
        self._reading = Lock()  # concurrent readers would count the same events twice

    def update(self) -> History:
        """Read new events, and return the history. A missing or unreadable file is not an error."""
        with self._reading:
            return self._read_on()

    def _read_on(self) -> History:
        try:
            found = self._path.stat()
            identity = (found.st_dev, found.st_ino)
            if identity != self._identity or found.st_size < self._at_bytes:
                # First read, or the file was rewritten with fewer lines.
                last_bytes = MAX_READ_BYTES if self._last_bytes is None else self._last_bytes
                begin = max(0, found.st_size - last_bytes)
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
        # An incomplete line is read again, unless it is too long to be an event.
        self._at_bytes = at_bytes + len(data) - (len(rest) if len(rest) < MAX_READ_BYTES else 0)
        for record in parsed(
            whole.decode("utf-8", errors="replace").split("\n"), with_ranks=self._with_ranks
        ):
            self.history.add(record)


def parsed(lines: Iterable[str], *, with_ranks: bool = True) -> Iterator[Record]:
    """Yield the records in lines of the file. Lines that this version cannot parse are skipped."""
    return parsed_records(line for line in lines if with_ranks or f'"{RankTimes.kind}"' not in line)


def as_json(record: Record) -> dict[str, object]:
    """Return a record as a JSON object; NaN and infinity become null, because browsers cannot parse them."""
    fields = json.loads(record.event.model_dump_json())
    return {"time_unix_s": record.time_unix_s, "rank": record.rank, "kind": record.event.kind, **fields}


TAIL_BYTES = 1 << 20
"""Only this many bytes at the end of the events are read, because the current state is sufficient."""


def read_recent(log_dir: Path) -> History:
    """Return the history of a run from its last events; an empty history if there are none."""
    return HistoryReader(log_dir, last_bytes=TAIL_BYTES).update()


def summary_lines(history: History, now_unix_s: float | None = None) -> Iterator[str]:
    """Yield lines that describe the progress of a run; none if no step was reported."""
    last = history.last
    if last is None:
        return
    of_rank_0 = " of rank 0" if history.loss_is_local else ""
    parts = (
        f"step {last.step:,}" + (f" of {history.num_steps:,}" if history.num_steps else ""),
        "" if last.epochs_begun is None else f"epoch {last.epochs_begun} of {history.num_epochs}",
        "" if last.loss is None else f"loss{of_rank_0} {last.loss:.4f}",
        "" if last.samples_per_s is None else f"{last.samples_per_s:,.0f} samples/s",
    )
    ago = duration(max(0.0, (time() if now_unix_s is None else now_unix_s) - last.time_unix_s))
    yield ", ".join(filter(None, parts)) + f"; {ago} ago"
    if history.checkpoint_error:
        yield f"the last checkpoint could not be written: {history.checkpoint_error}"
    window = history.ranks.recent(MIN_WINDOW_S)
    if window is None or window.seconds < MIN_WINDOW_S:
        return
    for slow in stragglers(window)[:8]:
        where = f", most of the difference in {slow.phase}" if slow.phase else ""
        yield (
            f"rank {slow.rank} is slow: {1000 * slow.own_s:,.1f} ms of own time per step, "
            f"the others {1000 * slow.others_s:,.1f} ms{where}"
        )
