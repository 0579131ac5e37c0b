"""Progress and slow ranks of a run, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import time

from horovod_train.events.text import duration
from horovod_train.monitor.history import History, HistoryReader
from horovod_train.monitor.stragglers import MIN_WINDOW_S, stragglers

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
