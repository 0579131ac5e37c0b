"""Times of ranks as a series of time windows."""

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
"""Above this number, neighboring windows are joined in pairs: memory and the heatmap's width are bounded."""

MAX_NUMBERS = 2**24
"""Limit for all windows of a run together; it reduces the number of windows of runs with many ranks."""


@dataclass
class Window:
    """Measurements of all ranks in one time window.

    Attributes:
        end_unix_s: End of the window, in Unix seconds.
        seconds: Length of the window.
        table: Sums over the steps of the window, shape [len(COLUMNS), ranks]; NaN: unknown.
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
        """Time that each rank waited for others, and time that others waited for it; shape [ranks] each.

        Ranks of jobs report these times, computed per step. Ranks of scripts do not exchange wait times, so
        their times are computed from sums over the window, in which waits of different steps may cancel out.
        """
        wait_s = self[WAIT_PHASE]
        if np.isfinite(self["waiting_s"]).any() or not np.isfinite(wait_s).all():
            return self["waiting_s"], self["waited_for_s"]
        waiting, waited_for, _ = attribute_waiting(wait_s[None, :].astype(np.float64))
        return waiting.astype(np.float32), waited_for.astype(np.float32)

    @property
    def own_s(self) -> Floats:
        """Own time of each rank: step time minus all-reduce wait, shape [ranks]."""
        found: Floats = self["step_s"] - self[WAIT_PHASE]
        return found

    def per_step(self, total_s: Floats) -> Floats:
        """Return the mean per step of times that were summed over the window, shape [ranks]; NaN: unknown."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = total_s / self["steps"]
        return found


@dataclass
class RankSeries:
    """Windows of a run, oldest first. In an elastic job, the number of ranks may differ between windows."""

    windows: list[Window] = field(default_factory=list)
    num_ranks: int = 0

    def begin(self, num_ranks: int) -> None:
        """Set the number of ranks when training starts."""
        self.num_ranks = num_ranks

    def add_event(self, time_unix_s: float, event: RankTimes) -> None:
        """Add reported times: rank 0 reports all ranks in several events, or each rank reports its own."""
        end = event.first_rank + len(event.steps)
        if end > self.num_ranks > 0:
            return  # no such rank: a task may print a line in the format of an event
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
        """Return whether the last window contains a rank. If so, its next report begins a new window."""
        steps = self.windows[-1]["steps"]
        return rank < len(steps) and bool(np.isfinite(steps[rank]))

    def add(self, window: Window) -> None:
        """Add a window that contains all ranks."""
        self.num_ranks = window.table.shape[1]
        self._append(window)

    def _append(self, window: Window) -> None:
        self.windows.append(window)
        if len(self.windows) > max(2, min(MAX_WINDOWS, MAX_NUMBERS // max(1, window.table.size))):
            self.windows = [
                joined(self.windows[place : place + 2]) for place in range(0, len(self.windows), 2)
            ]

    def recent(self, seconds: float) -> Window | None:
        """Return the last ``seconds`` as one window, less if the number of ranks changed; None: no window."""
        chosen: list[Window] = []
        for window in reversed(self.windows):
            if chosen and window.table.shape != chosen[0].table.shape:
                break
            chosen.insert(0, window)
            if sum(each.seconds for each in chosen) >= seconds:
                break
        return joined(chosen) if chosen else None


def unknown(num_ranks: int) -> Floats:
    """Return the table of a window, filled with NaN."""
    return np.full((len(COLUMNS), num_ranks), np.nan, np.float32)


def joined(windows: Sequence[Window]) -> Window:
    """Return consecutive windows as one. Windows with another number of ranks than the last are omitted."""
    last = windows[-1]
    alike = [window for window in windows if window.table.shape == last.table.shape]
    seconds = sum(window.seconds for window in alike)
    if len(alike) == 1:
        return last
    tables = np.stack([window.table for window in alike])
    table: Floats = np.asarray(np.nansum(tables, axis=0), np.float32)
    table[np.isnan(tables).all(axis=0)] = np.nan
    return Window(last.end_unix_s, seconds, table)
