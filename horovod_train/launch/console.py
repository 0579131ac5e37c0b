"""Display of a running job: a progress bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

from time import monotonic

from rich.console import Console
from rich.control import strip_control_codes
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from horovod_train.events.text import as_text, progress_text
from horovod_train.events.types import Event, Summary
from horovod_train.events.types import Progress as ProgressEvent

LINE_INTERVAL_S = 5.0


class JobConsole:
    """Display of the events and the output of a job on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._next_line = 0.0

    def show(self, event: Event, rank: int) -> None:
        """Show an event of a rank."""
        if isinstance(event, ProgressEvent):
            self._show_progress(event)
            return
        if isinstance(event, Summary):
            self.close()
        text = as_text(event, rank)
        if text is not None:
            self.print(text)

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

    def _show_progress(self, event: ProgressEvent) -> None:
        if not self._console.is_terminal:
            now = monotonic()
            if now >= self._next_line:
                self._next_line = now + LINE_INTERVAL_S
                self.print(progress_text(event))
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
