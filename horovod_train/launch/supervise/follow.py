"""Output of a run: each line is parsed once, and passed to all followers.

output of the launcher -> secrets hidden -> parsed -> followers: logs, stalls, targets, console, outcome
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import TypeVar

from horovod_train.events.file import EventsFile
from horovod_train.events.text import tagged
from horovod_train.events.types import Event, Failure, Preempted
from horovod_train.events.wire import Line, parse_line, split_at_event
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.secrets import Mask
from horovod_train.system.files import LogFile

# Messages that TensorFlow prints on every rank before its log level can be set.
CHATTER = re.compile(r"before absl::InitializeLog|port\.cc:\d+\] oneDNN custom operations")
Kind = TypeVar("Kind", bound=Event)


class Follower(ABC):
    """Consumer of the output of a run."""

    @abstractmethod
    def handle(self, line: Line) -> None:
        """Process one line. A line without rank is from the launcher."""

    def close(self) -> None:  # noqa: B027  (optional)
        """Finish the work at the end of an attempt."""


class Output:
    """Parser of the output of a run, which hides secrets and passes every line to the followers, in order."""

    def __init__(
        self, followers: Sequence[Follower], mask: Mask, num_ranks: int, *, is_of_rank: bool
    ) -> None:
        self._followers = followers
        self._mask = mask
        self._is_of_rank = is_of_rank
        self._is_alone = num_ranks == 1
        self._are_ranks_tagged = False
        self._lock = Lock()

    def handle(self, raw: str) -> None:
        """Process one line of a rank or of the launcher. Thread-safe."""
        with self._lock:
            for part in split_at_event(self._mask.hide(raw)):
                self._hand_on(parse_line(part))

    def _hand_on(self, line: Line) -> None:
        self._are_ranks_tagged |= line.is_tagged
        if line.is_launchers and (self._is_of_rank or (self._is_alone and not self._are_ranks_tagged)):
            line = replace(line, is_launchers=False)
        for follower in self._followers:
            follower.handle(line)

    def close(self) -> None:
        """Close all followers."""
        for follower in self._followers:
            follower.close()


class RunLog(Follower):
    """Follower that writes every line to the log of the run, which the caller closes."""

    def __init__(self, log: LogFile) -> None:
        self._log = log

    def handle(self, line: Line) -> None:
        """Write a line unchanged."""
        self._log.write(line.raw)


class ShowOnConsole(Follower):
    """Follower that shows the output and the events of ranks on a console."""

    def __init__(self, console: JobConsole) -> None:
        self._console = console
        self._is_preempted = False

    def handle(self, line: Line) -> None:
        """Show a line, unless it is a failure, which is reported at the end, or a repeated ``Preempted``."""
        match line.event:
            case None:
                if not line.is_launchers and not CHATTER.search(line.text):
                    self._console.print(tagged(line.rank, line.text))
            case Failure():
                self._console.record(line.event, line.rank or 0)
            case Preempted() if self._is_preempted:
                pass
            case event:
                self._is_preempted |= isinstance(event, Preempted)
                self._console.show(event, line.rank or 0)

    def close(self) -> None:
        """Remove the progress bar."""
        self._console.close()


class WriteEvents(Follower):
    """Follower that writes events to the events file of the run, which the caller closes."""

    def __init__(self, events: EventsFile) -> None:
        self._events = events

    def handle(self, line: Line) -> None:
        """Write the event of a line, if there is one."""
        if line.event is not None:
            self._events.write(line.event, line.rank)


class RecordEvents(Follower):
    """Follower that collects events for its caller."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def handle(self, line: Line) -> None:
        """Store the event of a line, if there is one."""
        if line.event is not None:
            self.events.append(line.event)

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]
