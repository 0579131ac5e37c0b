"""Output of a run: each line is parsed once, and passed to all followers.

    output of the launcher -> secrets hidden -> parsed -> followers: logs, stalls, targets, console, outcome

    RunLog, RankLogs             log files of the run and of ranks
    ShowOnConsole                output and events on a console
    WriteEvents, RecordEvents    events to the events file, or to the caller
    fetching_events              events of ranks, from all hosts, while they run
    TargetFiles                  files with the metrics endpoints of a job, for Prometheus
    Stalls                       ranks that are missing from a collective, from events and from the text of
                                 Horovod's stall inspector
    find_frozen, watching_ranks  frozen ranks, detected by their hosts

Frozen ranks are stopped, swapping, or blocked in a file system.
"""

from __future__ import annotations

import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from horovod_train.config.schema import Health
from horovod_train.errors import describe_ranks
from horovod_train.events.file import EventsFile
from horovod_train.events.types import Event, Failure, Preempted, Progress, Stalled, Summary, Target, Targets
from horovod_train.events.wire import Line, as_document, parse_line, parse_targets, split_at_event, tagged
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.hosts.host_group import HostGroup
from horovod_train.launch.hosts.staging import Mask
from horovod_train.system.files import LogFile, read_regular, write_atomic
from horovod_train.system.processes import background_thread

if TYPE_CHECKING:
    from horovod_train.launch.console import JobConsole

# Messages that TensorFlow prints on every rank before its log level can be set.
CHATTER = re.compile(r"before absl::InitializeLog|port\.cc:\d+\] oneDNN custom operations")
Kind = TypeVar("Kind", bound=Event)


class Follower(ABC):
    """Consumer of the output of a run."""

    @abstractmethod
    def handle(self, line: Line) -> None:
        """Process one line; the launcher's own have ``is_launchers``. The rank of a line may be unknown."""

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
        self._console.close()


class WriteEvents(Follower):
    """Follower that writes events to the events file of the run, which the caller closes."""

    def __init__(self, events: EventsFile) -> None:
        self._events = events

    def handle(self, line: Line) -> None:
        if line.event is not None:
            self._events.write(line.event, line.rank)


class RecordEvents(Follower):
    """Follower that collects events for its caller."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def handle(self, line: Line) -> None:
        if line.event is not None:
            self.events.append(line.event)

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]


class RankLogs(Follower):
    """Follower that writes the output of each rank, without events, to ``rank-N.log`` in the run folder."""

    def __init__(self, log_dir: Path, on_loss: Callable[[str], None]) -> None:
        self._log_dir = log_dir
        self._on_loss = on_loss
        self._logs: dict[int, LogFile] = {}

    def handle(self, line: Line) -> None:
        """Write a line, if the launcher has tagged it with its rank."""
        if line.event is not None or line.rank is None:
            return
        if line.rank not in self._logs:
            self._logs[line.rank] = LogFile(self._log_dir / f"rank-{line.rank}.log", self._on_loss)
        self._logs[line.rank].write(line.text)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


INTERVAL_S = 0.1
INTERVAL_PER_HOST_S = 0.005


def fetching_events(hosts: HostGroup, handle: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call ``handle`` with each new event of ranks, as a line, while the block runs and once after it."""
    interval_s = INTERVAL_S + INTERVAL_PER_HOST_S * len(hosts.connections)

    def fetch(over: threading.Event) -> None:
        is_last = False
        while not is_last:
            is_last = over.wait(interval_s)
            while lines := hosts.new_events():
                for line in lines:
                    handle(line)

    return background_thread(fetch)


TARGETS_FILE = "prometheus-targets.json"


class TargetFiles(Follower):
    """Follower that writes the target files for Prometheus, and removes the run's targets at the end.

    The files may also contain targets of other runs of the job.
    """

    def __init__(self, paths: Sequence[Path], run_id: str, warn: Callable[[str], None]) -> None:
        self._paths = paths
        self._run_id = run_id
        self._warn = warn
        self._targets: list[Target] = []

    def handle(self, line: Line) -> None:
        if isinstance(line.event, Targets):
            self._targets += line.event.targets
            self._write(self._targets)

    def close(self) -> None:
        if self._targets:
            self._write([])

    def _write(self, targets: Sequence[Target]) -> None:
        for path in self._paths:
            try:
                write_targets(path, [*self._of_others(path, targets), *targets])
            except OSError as error:
                self._warn(f"warning: {path} was not written for Prometheus: {error.strerror}")

    def _of_others(self, path: Path, targets: Sequence[Target]) -> list[Target]:
        """Return the targets of other runs, except ended ones, whose addresses this run uses now."""
        ours = {target.address for target in targets}
        return [
            other
            for other in read_targets(path)
            if other.labels.get("run", self._run_id) != self._run_id and other.address not in ours
        ]


def read_targets(path: Path) -> list[Target]:
    """Return the targets in a file; empty, if it cannot be read."""
    try:
        return parse_targets(read_regular(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def target_paths(request: LaunchRequest) -> list[Path]:
    """Return the target files of a job: one in its folder, and one in ``metrics.targets_dir`` if set."""
    paths = [request.run_dir / TARGETS_FILE]
    if (shared := request.job.metrics.targets_dir) is not None:
        paths.append(Path(shared) / f"{request.job.name}.json")
    return paths


def write_targets(path: Path, targets: Iterable[Target]) -> None:
    """Write a file for ``file_sd_configs`` of Prometheus atomically; Prometheus reads changed files again."""
    # Prometheus usually runs as another user.
    write_atomic(path, json.dumps(as_document(targets), indent=2) + "\n", mode=0o644)


# "1!: [allreduce.gradients, ...]": a rank, and the collectives that it is missing from.
_MISSING = re.compile(r"(\d+)!?: \[(.+?)(?: \.\.\.)?\]$")


class Stalls(Follower):
    """Follower that tracks, in ``missing``, the collectives that a rank is missing from, by rank.

    ``report`` is called with a sentence when they change; with an empty text when no rank is missing.
    ``diagnosis`` says what these ranks do; empty: it is not known.
    """

    diagnosis = ""

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


POLL_INTERVAL_S = 1.0
# Ranks send two heartbeats per second, which may be delayed.
MIN_SILENCE_S = 2.0
# Hints by the state of a process.
HINTS = {
    "stopped": "its process is stopped (SIGSTOP): `kill -CONT {pid}` on {host} continues it",
    "tracing-stop": "a debugger holds it: detach it from process {pid} on {host}",
    "sleeping": "a library that holds the GIL waits: `py-spy dump --native --pid {pid}` on {host} "
    "shows where",
    "disk-sleep": "it waits for a disk or a network file system of {host}: is that up? see `dmesg` there",
}
OTHER_HINT = "is {host} out of memory, so that it swaps? see `dmesg` and `vmstat 1` there"


@dataclass(frozen=True)
class Frozen:
    """A rank without heartbeat and CPU activity for ``silent_s``; ``doing`` is the state of its process."""

    rank: int
    host: str
    pid: int
    silent_s: float
    doing: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid}, {self.doing}) shows no sign of life"

    @property
    def hint(self) -> str:
        """Hint for the user."""
        return HINTS.get(self.doing, OTHER_HINT).format(pid=self.pid, host=self.host)


def find_frozen(hosts: HostGroup, limit_s: float) -> list[Frozen]:
    """Return the ranks without heartbeat and CPU activity for at least ``limit_s``, sorted by rank."""
    silent = hosts.unresponsive_ranks(limit_s)
    found = [
        Frozen(each.rank, host, each.pid, each.silent_s, each.doing)
        for host, ranks in silent.items()
        for each in ranks
    ]
    return sorted(found, key=lambda each: each.rank)


def watching_ranks(
    hosts: HostGroup,
    health: Health,
    report: Callable[[Sequence[Frozen]], None],
    abort_frozen_ranks: Callable[[Sequence[Frozen]], None],
    report_wait: Callable[[bool], None] = lambda _: None,
) -> AbstractContextManager[None]:
    """Check the ranks of all hosts once a second while the block runs.

    Args:
        hosts: Hosts of the attempt.
        health: Time limits for the warning and for the end of the ranks.
        report: Called with the frozen ranks when they change; with none when all ranks respond.
        abort_frozen_ranks: Called once, with the ranks that are frozen for ``stall_shutdown_s``.
        report_wait: Called with whether a rank has waited in a collective for ``stall_warning_s``, if that
            changes. Horovod's stall inspector notices it up to twice as late.
    """
    warning_s = max(health.stall_warning_s, MIN_SILENCE_S)
    shutdown_s = max(health.stall_shutdown_s, 2 * MIN_SILENCE_S)

    def look(over: threading.Event) -> None:
        last: list[str] = []
        was_waiting = False
        while not over.wait(POLL_INTERVAL_S):
            if (is_waiting := hosts.longest_wait_s() >= health.stall_warning_s) != was_waiting:
                report_wait(was_waiting := is_waiting)
            frozen = find_frozen(hosts, warning_s)
            if (now := list(map(str, frozen))) != last:
                last = now
                report(frozen)
            if lost := [each for each in frozen if each.silent_s >= shutdown_s]:
                abort_frozen_ranks(lost)
                return

    return background_thread(look)
