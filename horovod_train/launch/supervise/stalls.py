"""Ranks that are missing from a collective, from events and from the text of Horovod's stall inspector."""

from __future__ import annotations

import re
from collections.abc import Callable

from horovod_train.errors import describe_ranks
from horovod_train.events.types import Progress, Stalled, Summary
from horovod_train.events.wire import Line
from horovod_train.launch.supervise.follow import Follower

# "1!: [allreduce.gradients, ...]": a rank, and the collectives that it is missing from.
_MISSING = re.compile(r"(\d+)!?: \[(.+?)(?: \.\.\.)?\]$")


class Stalls(Follower):
    """Follower that tracks, in ``missing``, the collectives that a rank is missing from, by rank.

    ``report`` is called with a sentence when they change; with an empty text when no rank is missing.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self.missing: dict[int, str] = {}
        self._report = report
        self._listed_by: int | None = None

    def __str__(self) -> str:
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(self.missing):
            ranks_of.setdefault(self.missing[rank], []).append(rank)
        if len(ranks_of) == 1:
            ((collective, ranks),) = ranks_of.items()
            return f"{describe_ranks(ranks)} did not join a collective that the others wait in: {collective}"
        # Each waits in what another one has not joined: ranks took different branches.
        return "; ".join(
            f"{describe_ranks(ranks)} did not join {collective}" for collective, ranks in ranks_of.items()
        )

    def handle(self, line: Line) -> None:
        """Process an event, or text in which Horovod's inspector lists ranks; progress ends a stall."""
        if isinstance(line.event, Stalled):
            self.missing = dict.fromkeys(line.event.absent_ranks, line.event.collective)
            self._report(str(self))
        elif isinstance(line.event, Progress | Summary):
            if self.missing:
                self.missing.clear()
                self._report("")
        elif line.event is None and line.rank is not None:
            self._see_text(line.rank, line.text)

    def _see_text(self, rank: int, text: str) -> None:
        if text.strip() == "Missing ranks:":
            self._listed_by = rank
            self.missing.clear()
        elif self._listed_by == rank and (found := _MISSING.match(text)):
            self.missing[int(found[1])] = found[2]
            self._report(str(self))
        elif self._listed_by == rank:
            self._listed_by = None
