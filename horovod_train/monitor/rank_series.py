"""Where the time of each rank went, window after window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from horovod_train.events.types import PHASES, WAIT_PHASE, RankTimes
from horovod_train.telemetry.waiting import attribute_waiting

Floats = npt.NDArray[np.float32]

COLUMNS = ("steps", "samples", "step_s", "waiting_s", "waited_for_s", *PHASES)
MAX_WINDOWS = 360
"""When there are more, two become one: the picture stays as wide as a screen, and memory as small."""

MAX_NUMBERS = 2**24
"""In all windows of a run together: with very many ranks there are fewer windows."""


@dataclass
class Window:
    """Some time of all ranks.

    Attributes:
        end_unix_s: When it ended.
        seconds: How long it was.
        table: Sums over its steps, shape [len(COLUMNS), ranks]; NaN: not known.
    """

    end_unix_s: float
    seconds: float
    table: Floats

    def __getitem__(self, column: str) -> Floats:
        """Return a column, shape [ranks]."""
        found: Floats = self.table[COLUMNS.index(column)]
        return found

    @property
    def wait_times(self) -> tuple[Floats, Floats]:
        """Time that each rank waited for others, and was waited for; shape [ranks] each.

        Ranks of jobs tell it step by step. Scripts do not talk to each other: for theirs it follows from
        the sums, which leaves out what evens out within the window.
        """
        wait_s = self[WAIT_PHASE]
        if np.isfinite(self["waiting_s"]).any() or not np.isfinite(wait_s).all():
            return self["waiting_s"], self["waited_for_s"]
        waiting, waited_for, _ = attribute_waiting(wait_s[None, :].astype(np.float64))
        return waiting.astype(np.float32), waited_for.astype(np.float32)

    @property
    def own_s(self) -> Floats:
        """Own time of each rank: of its steps, without waiting for the all-reduce; shape [ranks]."""
        found: Floats = self["step_s"] - self[WAIT_PHASE]
        return found


@dataclass
class RankSeries:
    """Windows of a run, the oldest first; those of an elastic job may have different numbers of ranks."""

    windows: list[Window] = field(default_factory=list)
    num_ranks: int = 0

    def begin(self, num_ranks: int) -> None:
        """Ranks have begun to train."""
        self.num_ranks = num_ranks

    def add_event(self, time_unix_s: float, event: RankTimes) -> None:
        """Take what some ranks have told: rank 0 of all, some in each event, or each rank of itself."""
        end = event.first_rank + len(event.steps)
        if end > self.num_ranks > 0:
            return  # a run has no such rank: a task can print anything
        if not self.windows or self._is_reported(event.first_rank):
            self._append(Window(time_unix_s, event.seconds, unknown(max(end, self.num_ranks))))
        window = self.windows[-1]
        if window.table.shape[1] < end:
            more = unknown(end - window.table.shape[1])
            window.table = np.concatenate([window.table, more], axis=1)
        columns: Mapping[str, Sequence[float]] = {
            "steps": event.steps,
            "samples": event.samples,
            "step_s": event.step_s,
            "waiting_s": event.waiting_s,
            "waited_for_s": event.waited_for_s,
            **event.phases_s,
        }
        for row, column in enumerate(COLUMNS):
            numbers = columns.get(column, ())
            if len(numbers) == len(event.steps):
                window.table[row, event.first_rank : end] = numbers

    def _is_reported(self, rank: int) -> bool:
        """Whether a rank is in the last window already: then another one begins."""
        steps = self.windows[-1]["steps"]
        return rank < len(steps) and bool(np.isfinite(steps[rank]))

    def add(self, window: Window) -> None:
        """Add a window of all ranks."""
        self.num_ranks = window.table.shape[1]
        self._append(window)

    def _append(self, window: Window) -> None:
        self.windows.append(window)
        if len(self.windows) > max(2, min(MAX_WINDOWS, MAX_NUMBERS // max(1, window.table.size))):
            self.windows = [
                joined(self.windows[place : place + 2]) for place in range(0, len(self.windows), 2)
            ]

    def recent(self, seconds: float) -> Window | None:
        """Return the last so many seconds as one window; None: there is nothing, or ranks have changed."""
        chosen: list[Window] = []
        for window in reversed(self.windows):
            if chosen and window.table.shape != chosen[0].table.shape:
                break
            chosen.insert(0, window)
            if sum(each.seconds for each in chosen) >= seconds:
                break
        return joined(chosen) if chosen else None


def unknown(num_ranks: int) -> Floats:
    """Return a table of which nothing is known yet."""
    return np.full((len(COLUMNS), num_ranks), np.nan, np.float32)


def joined(windows: Sequence[Window]) -> Window:
    """Return windows that follow each other as one; the newest decides how many ranks there are."""
    last = windows[-1]
    alike = [window for window in windows if window.table.shape == last.table.shape]
    seconds = sum(window.seconds for window in alike)
    if len(alike) == 1:
        return last
    tables = np.stack([window.table for window in alike])
    table: Floats = np.asarray(np.nansum(tables, axis=0), np.float32)
    table[np.isnan(tables).all(axis=0)] = np.nan
    return Window(last.end_unix_s, seconds, table)
