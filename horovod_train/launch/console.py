"""Display of a running job: a progress bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

from time import monotonic

from rich.console import Console
from rich.control import strip_control_codes
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from horovod_train.events.types import Event, Summary
from horovod_train.events.types import Progress as ProgressEvent
from horovod_train.events.wire import as_text, progress_text, to_line, with_event

LINE_INTERVAL_S = 5.0
EVENTS_VARIABLE = "HOROVOD_TRAIN_EVENTS_IN_OUTPUT"
"""Environment variable that adds events to the output, where it is all that remains of a run."""
EVENTS_PER_PERIOD = 1000
"""Repeated events are written at intervals of the elapsed time divided by this, so that the output of a long
run is not rotated: kubelet keeps 10 MiB by default."""


class JobConsole:
    """Display of the events and the output of a job on a console.

    Args:
        console: The console.
        has_events: Add each event as JSON to its line of text (``with_event``).
    """

    def __init__(self, console: Console, *, has_events: bool = False) -> None:
        self._console = console
        self._has_events = has_events
        self._begun_s = monotonic()
        self._next_event_s: dict[str, float] = {}
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._next_line = 0.0

    def show(self, event: Event, rank: int) -> None:
        """Show an event of a rank."""
        if isinstance(event, ProgressEvent):
            self._show_progress(event, rank)
            return
        if isinstance(event, Summary):
            self.close()
        text = as_text(event, rank)
        if self._has_events and (text is not None or self._is_due(event)):
            self.print(with_event(text, event, rank))
        elif text is not None:
            self.print(text)

    def record(self, event: Event, rank: int) -> None:
        """Write an event that is shown elsewhere, if the output contains events."""
        if self._has_events:
            self.print(to_line(event, rank))

    def _is_due(self, event: Event) -> bool:
        """Return whether a repeated event is written now."""
        now = monotonic()
        if now < self._next_event_s.get(event.kind, 0.0):
            return False
        self._next_event_s[event.kind] = now + (now - self._begun_s) / EVENTS_PER_PERIOD
        return True

    def print(self, text: str) -> None:
        """Print text, above the progress bar if there is one."""
        if self._progress is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        if self._console.quiet:
            return
        # rich is bypassed, because it may format lines more slowly than a task prints them.
        self._console.file.write(strip_control_codes(text) + "\n")
        self._console.file.flush()

    def close(self) -> None:
        """Remove the progress bar. Safe to call twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show_progress(self, event: ProgressEvent, rank: int) -> None:
        if not self._console.is_terminal:
            now = monotonic()
            is_last = event.step == event.num_steps
            if now >= self._next_line or (self._has_events and is_last):
                self._next_line = now + LINE_INTERVAL_S
                text = progress_text(event)
                has_event = self._has_events and (is_last or self._is_due(event))
                self.print(with_event(text, event, rank) if has_event else text)
            return
        if self._progress is None or self._task is None:
            self._progress = Progress(
                BarColumn(bar_width=10),
                TextColumn("{task.fields[numbers]}"),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("", total=None, numbers="")
            self._progress.start()
        self._progress.update(
            self._task,
            completed=event.step,
            total=event.num_steps or None,  # unknown for a script: the bar pulses
            numbers=progress_text(event),
        )
