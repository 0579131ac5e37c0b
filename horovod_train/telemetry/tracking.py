"""Experiment trackers of a run, which store losses and metrics of runs for comparison.

    Tracker                        interface of experiment trackers
    TrackerThread, Trackers        the trackers of a run, and the thread of each
    OneValuePerStep                rule of trackers that cannot replace values
    open_trackers, make_tracker    create the trackers of a job
    history_of                     values in the events of all runs of a job

Each tracker has its own thread, on rank 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import Protocol

from horovod_train.config.schema import Job, Tracking
from horovod_train.errors import result_of
from horovod_train.events.file import EVENTS_FILE, Series, read_events, series_of
from horovod_train.events.types import (
    WAIT_PHASE,
    CheckpointWritten,
    Event,
    Notice,
    Preempted,
    Progress,
    RankTimes,
    ScriptDone,
    Summary,
)
from horovod_train.events.wire import Reporter
from horovod_train.registry import TRACKERS
from horovod_train.system.machine import versions_with
from horovod_train.telemetry.catalog import TrackerRecord
from horovod_train.telemetry.recorder import Recorder


@dataclass(frozen=True)
class TrackedRun:
    """Run that is tracked.

    Attributes:
        job: Resolved job, as JSON.
        folder: Folder that contains the runs of the job.
        step: Completed steps at the start; greater than 0 if training resumes from a checkpoint.
        versions: Versions of installed packages by name.
        history: Returns the values in the events of earlier runs of this job. A tracker that sends values
            later than they are logged adds those that a killed rank did not send.
    """

    job: Mapping[str, object]
    run_id: str
    folder: Path
    world_size: int
    step: int
    versions: Mapping[str, str] = field(default_factory=dict)
    history: Callable[[], Series] = dict

    def missing(self, last: Mapping[str, int]) -> list[tuple[int, dict[str, float]]]:
        """Return step and values of the history after the last stored step, up to the start of this run.

        Args:
            last: Last stored step, by kind (``kind_of``).
        """
        if not self.step:
            return []
        rows: dict[tuple[int, str], dict[str, float]] = {}
        for name, points in self.history().items():
            kind = kind_of([name])
            for step, value in points:
                if last[kind] < step <= self.step:
                    rows.setdefault((step, kind), {})[name] = value
        # A step precedes the evaluation after it.
        return [(step, values) for (step, _), values in sorted(rows.items(), key=_by_step)]


def _by_step(row: tuple[tuple[int, str], object]) -> tuple[int, bool]:
    (step, kind), _ = row
    return step, kind == "evaluation"


def kind_of(names: Iterable[str]) -> str:
    """Return whether values with some names are those of a ``step`` or of an ``evaluation``."""
    return "evaluation" if any(name.startswith("eval/") for name in names) else "step"


class OneValuePerStep:
    """Rule of trackers that cannot replace values: the first value of a step is kept.

    Args:
        last: Last stored step, by kind (``kind_of``).
        step: Completed steps at the start of this run.
        on_return: Called with the first step that is repeated after a return to a checkpoint.
    """

    def __init__(self, last: Mapping[str, int], step: int, on_return: Callable[[int], None]) -> None:
        self._last = dict(last)
        self._previous_step = step
        self._on_return = on_return

    def accepts(self, step: int, values: Iterable[str]) -> bool:
        """Return whether values of a step are stored, because neither this nor a later step was before."""
        kind = kind_of(values)
        is_repeated = step <= self._last[kind]
        if kind == "step":
            if is_repeated and step <= self._previous_step:
                self._on_return(step)
            self._previous_step = step
        if not is_repeated:
            self._last[kind] = step
        return not is_repeated

    @property
    def last_step(self) -> int:
        """Last step that was stored."""
        return self._last["step"]


SummaryValues = dict[str, float | str]
"""Values of a whole run: ``state`` (succeeded, preempted or failed), ``checkpoint`` (path of the newest one),
and for each rank ``own_s/rank_<n>`` (own time per step, in seconds) and ``waiting/rank_<n>`` (fraction of the
time spent waiting for later ranks), if the all-reduce wait is measured.
"""


class Tracker(Protocol):
    """Tracker, created with the job's ``args`` on rank 0.

    Its methods are called in its own thread, so that training does not wait for a slow tracker. After an
    exception, which is reported once, the tracker is disabled and training continues. If it also has a method
    ``summarize(values)``, this is called with ``SummaryValues`` before ``end``, unless the rank was killed. A
    job that ends waits longer for a tracker with a true attribute ``is_preparing``, such as one that creates
    a database on this machine.
    """

    def start(self, run: TrackedRun) -> None:
        """Start tracking; called when training starts or resumes."""
        ...

    def log(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Store values by name.

        Args:
            step: Completed optimizer steps. After a return to a checkpoint, it may be smaller than before:
                the later values are valid.
            epochs: Epochs passed; NaN: unknown.
            values: Of a step: ``loss``, ``lr``, ``samples_per_s`` of reported steps, and further values if
                computed, such as ``grad_norm``; of an evaluation: ``eval/<metric>``.
        """
        ...

    def end(self) -> None:
        """Stop tracking; called when training is complete, is preempted, or fails."""
        ...


MAX_QUEUED_CALLS = 10_000
"""Maximum number of queued calls of a slow tracker; further calls are dropped and counted."""

CLOSE_S = 10.0
"""Maximum time for queued calls when the rank ends."""

PREPARE_S = 15.0
"""Maximum time for a tracker that prepares something on this machine, in addition: a job that is preempted
usually has 30 seconds."""

CREDENTIALS = re.compile(r"//[^/@\s]+@")  # in a URL
MAX_RANKS_SUMMARIZED = 128
"""Maximum number of ranks in the summary; with more ranks, the slowest ones."""


class TrackerThread:
    """Thread that calls one tracker.

    Args:
        name: Name of the tracker, for messages.
        tracker: The tracker.
        print_notice: Called with messages for the user.
        count_lost: Called with numbers of calls that were dropped or failed.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        print_notice: Callable[[str], None],
        count_lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.tracker = tracker
        self._name = name
        self._print_notice = print_notice
        self._count_lost = count_lost
        self._num_dropped = 0
        self._is_ending = False
        self._began_s: float | None = None  # the call that runs now
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def enqueue(self, call: Callable[[], None]) -> None:
        """Queue a call of the tracker; does not block."""
        if self._queue.qsize() >= MAX_QUEUED_CALLS:
            self._num_dropped += 1
            self._count_lost(1)
        else:
            self._queue.put(call)

    def close(self) -> None:
        """Wait for queued calls, for up to ``CLOSE_S``; report dropped calls."""
        self._queue.put(None)
        end_s = monotonic() + PREPARE_S
        while (
            getattr(self.tracker, "is_preparing", False) and self._thread.is_alive() and monotonic() < end_s
        ):
            self._thread.join(0.1)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            num_waiting = self._queue.qsize()  # the last entry is the None from above
            self._num_dropped += max(0, num_waiting - 1)
            self._count_lost(max(0, num_waiting - 1))
            if not num_waiting:
                self._print_notice(
                    f"tracker {self._name} has not closed after {CLOSE_S:g} s: values not yet stored are lost"
                )
        if self._num_dropped:
            waiting_s = 0.0 if self._began_s is None else monotonic() - self._began_s
            why = (
                f"has not answered for {waiting_s:.0f} s (is its server reachable?)"
                if waiting_s >= CLOSE_S
                else "is too slow"
            )
            self._print_notice(f"tracker {self._name} {why}: {self._num_dropped} call(s) were dropped")

    def _work(self) -> None:
        _, error = result_of(self._serve)
        if error is not None:  # any error: training continues
            text = CREDENTIALS.sub("//***@", f"{type(error).__name__}: {error}")
            self._print_notice(f"tracker {self._name} is disabled: {text}")
            self._count_lost(1)
            if not self._is_ending:
                self._discard_calls()

    def _serve(self) -> None:
        try:
            while (call := self._queue.get()) is not None:
                self._began_s = monotonic()
                call()
                self._began_s = None
            self._is_ending = True
            self.tracker.end()
        except SystemExit as left:
            raise RuntimeError(f"the tracker called sys.exit({left.code!r})") from left

    def _discard_calls(self) -> None:
        """Discard further calls and count them as lost; they are not reported as dropped."""
        while self._queue.get() is not None:
            self._count_lost(1)


class Trackers:
    """Trackers of a run. They receive steps and evaluations, and the summary of the events of rank 0.

    Args:
        trackers: Section of the job and thread of each tracker.
        run: Function that returns the description of the run for the step at which training starts.
    """

    def __init__(
        self, trackers: list[tuple[Tracking, TrackerThread]], run: Callable[[int], TrackedRun]
    ) -> None:
        self._trackers = trackers
        self._run = run
        self._throughput = (-1, 0.0)
        self._totals: dict[int, tuple[int, float, float | None, float]] = {}
        self._ending: SummaryValues = {"state": "failed"}

    def start(self, step: int) -> None:
        """Start the trackers."""
        tracked = self._run(step)
        for _, thread in self._trackers:
            thread.enqueue(partial(thread.tracker.start, tracked))

    def log_step(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Log values of a step, every ``every_steps`` steps of the tracker."""
        at, samples_per_s = self._throughput
        known = {**values, "samples_per_s": samples_per_s} if at == step else values
        for section, thread in self._trackers:
            if step % section.every_steps == 0:
                thread.enqueue(partial(thread.tracker.log, step, epochs, known))

    def log_evaluation(self, step: int, epochs: float, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation."""
        values = {f"eval/{name}": value for name, value in metrics.items()}
        for _, thread in self._trackers:
            thread.enqueue(partial(thread.tracker.log, step, epochs, values))

    def observe(self, event: Event) -> None:
        """Record throughput, times of ranks, checkpoints and the final state from an event."""
        match event:
            case Progress():
                if event.samples_per_s is not None:
                    self._throughput = (event.step, event.samples_per_s)
            case RankTimes():
                self._add_times(event)
            case CheckpointWritten() if not event.error:
                self._ending["checkpoint"] = event.path
            case Summary() | ScriptDone():
                self._ending["state"] = "succeeded"
            case Preempted():
                self._ending["state"] = "preempted"
            case _:
                pass

    def observe_script(self, event: Event) -> None:
        """Record an event of a script, and log its reported steps; epochs are unknown."""
        self.observe(event)
        if isinstance(event, Progress):
            known = {"loss": event.loss, "lr": event.lr, **event.numbers}
            values = {name: value for name, value in known.items() if value is not None}
            self.log_step(event.step, math.nan, values)

    def _add_times(self, event: RankTimes) -> None:
        allreduce_wait_s = event.phases_s.get(WAIT_PHASE)
        if allreduce_wait_s is None:  # own time is not measured
            return
        for place, num_steps in enumerate(event.steps):
            rank = event.first_rank + place
            steps, own_s, waiting_s, seconds = self._totals.get(rank, (0, 0.0, 0.0, 0.0))
            own_s += event.step_s[place] - allreduce_wait_s[place]
            is_known = waiting_s is not None and bool(event.waiting_s)
            waited_s = (waiting_s or 0.0) + event.waiting_s[place] if is_known else None
            self._totals[rank] = steps + num_steps, own_s, waited_s, seconds + event.seconds

    def summary(self) -> SummaryValues:
        """Return the state and checkpoint, and own time per step and share of waiting of each rank."""
        own_s = {rank: own / steps for rank, (steps, own, *_) in self._totals.items() if steps}
        ranks = sorted(own_s)
        if len(ranks) > MAX_RANKS_SUMMARIZED:
            ranks = sorted(sorted(ranks, key=lambda rank: -own_s[rank])[:MAX_RANKS_SUMMARIZED])
        values: SummaryValues = {f"own_s/rank_{rank}": own_s[rank] for rank in ranks}
        for rank in ranks:
            _, _, waiting_s, seconds = self._totals[rank]
            if waiting_s is not None and seconds:
                values[f"waiting/rank_{rank}"] = waiting_s / seconds
        return {**self._ending, **values}

    def close(self) -> None:
        """Store the summary, and end the trackers."""
        summary = self.summary()
        for _, thread in self._trackers:
            if hasattr(thread.tracker, "summarize"):
                thread.enqueue(partial(thread.tracker.summarize, summary))
            thread.close()


def open_trackers(
    job: Job, run_id: str, world_size: int, reporter: Reporter, recorder: Recorder, stack: ExitStack
) -> Trackers | None:
    """Create the trackers of a job on rank 0, and close them with ``stack``; None: the job has no trackers.

    Raises:
        UserError: A tracker cannot be created.
    """
    sections = job.metrics.trackers
    if not sections:
        return None

    def print_notice(text: str) -> None:
        reporter.report(Notice(text=text))

    def count_lost(num_calls: int) -> None:
        recorder.record(TrackerRecord(num_calls))

    made = [(section, make_tracker(section)) for section in sections]
    threads = [(each, TrackerThread(each.name, tracker, print_notice, count_lost)) for each, tracker in made]
    folder = Path(job.run_dir).expanduser().absolute() / job.name
    tracked = partial(
        TrackedRun,
        job.model_dump(mode="json"),
        run_id,
        folder,
        world_size,
        versions=versions_with(job.framework),
        history=partial(history_of, folder),
    )
    trackers = Trackers(threads, tracked)
    stack.callback(trackers.close)
    return trackers


def history_of(folder: Path) -> Series:
    """Return the values in the events of all runs of a job; those of repeated steps are the later ones."""
    files = sorted(folder.glob(f"*/{EVENTS_FILE}"), key=lambda file: file.stat().st_mtime)
    return series_of(record.event for file in files for record in read_events(file))


def make_tracker(section: Tracking) -> Tracker:
    """Create a tracker of the job.

    Raises:
        UserError: The tracker cannot be imported, or rejects its arguments.
    """
    tracker: Tracker = TRACKERS.make(
        section.name, lambda factory: factory(**section.args), args_field="metrics.trackers.args"
    )
    return tracker
