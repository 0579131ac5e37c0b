"""Experiment trackers of the job, which receive losses and metrics on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from horovod_train.config.schema import Tracking
from horovod_train.errors import result_of
from horovod_train.events.types import Notice
from horovod_train.events.wire import Reporter
from horovod_train.registry import TRACKERS
from horovod_train.system.versions import versions_with
from horovod_train.telemetry.catalog import shown_numbers
from horovod_train.telemetry.trackers.base import TrackedRun, Tracker
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.run import Run

MAX_WAITING = 10_000
"""Maximum number of queued calls of a slow tracker; further calls are dropped and counted."""

CLOSE_S = 10.0
"""Maximum time for queued calls when the rank ends."""


class TrackerThread:
    """Thread that calls one tracker. Messages use its name and are passed to ``print_notice``."""

    def __init__(self, name: str, tracker: Tracker, print_notice: Callable[[str], None]) -> None:
        self.tracker = tracker
        self._name = name
        self._print_notice = print_notice
        self._num_dropped = 0
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def enqueue(self, call: Callable[[], None]) -> None:
        """Queue a call of the tracker; does not block."""
        if self._waiting.qsize() >= MAX_WAITING:
            self._num_dropped += 1
        else:
            self._waiting.put(call)

    def close(self) -> None:
        """Wait for queued calls, for up to ``CLOSE_S``; report dropped calls."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            num_waiting = self._waiting.qsize()  # the last entry is the None from above
            self._num_dropped += max(0, num_waiting - 1)
            if not num_waiting:
                self._print_notice(
                    f"tracker {self._name} has not closed after {CLOSE_S:g} s: what it did not store is lost"
                )
        if self._num_dropped:
            self._print_notice(f"tracker {self._name} is too slow: {self._num_dropped} call(s) were dropped")

    def _work(self) -> None:
        _, error = result_of(self._serve)
        if error is not None:  # any error: training continues
            self._print_notice(f"tracker {self._name} is disabled: {type(error).__name__}: {error}")
            self._discard_calls()

    def _serve(self) -> None:
        try:
            while (call := self._waiting.get()) is not None:
                call()
            self.tracker.end()
        except SystemExit as left:
            raise RuntimeError(f"it calls sys.exit({left.code!r})") from left

    def _discard_calls(self) -> None:
        """Discard further calls, so that they do not count as dropped."""
        while self._waiting.get() is not None:
            pass


class Track(Hook):
    """Passes results of steps and evaluations to trackers.

    ``run`` returns the description of the run; its argument is the step at which training starts.
    """

    def __init__(
        self, trackers: list[tuple[Tracking, TrackerThread]], run: Callable[[int], TrackedRun]
    ) -> None:
        self._trackers = trackers
        self._run = run

    @classmethod
    def of(cls, parts: HookParts) -> Track | None:
        """Return the hook; None: a rank other than 0, or a job without trackers.

        Raises:
            UserError: A tracker cannot be created.
        """
        job, print_notice = parts.job, partial(report_notice, parts.reporter)
        if parts.world.rank != 0 or not job.metrics.trackers:
            return None
        made = [(section, make_tracker(section)) for section in job.metrics.trackers]
        threads = [(section, TrackerThread(section.name, tracker, print_notice)) for section, tracker in made]
        for _, thread in threads:
            parts.at_end.callback(thread.close)
        tracked = partial(
            TrackedRun,
            job.model_dump(mode="json"),
            parts.run_id,
            Path(job.run_dir).expanduser().absolute() / job.name,
            parts.world.size,
            versions=versions_with(job.framework),
        )
        return cls(threads, tracked)

    def on_start(self, run: Run) -> None:
        """Start the trackers."""
        tracked = self._run(run.progress.step)
        for _, thread in self._trackers:
            thread.enqueue(partial(thread.tracker.start, tracked))

    def on_reading(self, run: Run, report: StepReport) -> None:
        """Log the result of a step, every ``every_steps`` steps of the tracker."""
        outcome = report.outcome
        values = {"loss": outcome.loss, "lr": report.lr, **shown_numbers(outcome.numbers)}
        if outcome.grad_norm is not None:
            values["grad_norm"] = outcome.grad_norm
        for section, thread in self._trackers:
            if report.step % section.every_steps == 0:
                thread.enqueue(partial(thread.tracker.log, report.step, report.epochs_passed, values))

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        """Log the metrics of an evaluation."""
        if not evaluated:
            return
        progress = run.progress
        values = {f"eval/{name}": value for name, value in progress.metrics.items()}
        for _, thread in self._trackers:
            thread.enqueue(partial(thread.tracker.log, progress.step, progress.epochs_passed, values))


def make_tracker(section: Tracking) -> Tracker:
    """Create a tracker of the job.

    Raises:
        UserError: The tracker cannot be imported, or rejects its arguments.
    """
    tracker: Tracker = TRACKERS.make(
        section.name, lambda factory: factory(**section.args), args_field="metrics.trackers.args"
    )
    return tracker


def report_notice(reporter: Reporter, text: str) -> None:
    """Report a message for the user."""
    reporter.report(Notice(text=text))
