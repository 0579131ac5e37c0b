"""Follow the output of a job, show it, and know in the end how it went."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from horovod_train.errors import HorovodTrainError, LaunchError, LostError, PreemptedError, describe_ranks
from horovod_train.events import TAG, Event, parse_line, tagged
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.secrets import Mask
from horovod_train.launch.logs import LogFile
from horovod_train.launch.supervise.frozen_ranks import Frozen
from horovod_train.launch.supervise.targets import write_targets

TARGETS_FILE = "prometheus-targets.json"
NUM_LAST_LINES = 20


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        code: Exit code of the command that started the ranks.
        stopped_by: The signal that this process got; None: it ended by itself.
        lost: The host that stopped answering, and why that is thought; None: none did.
        frozen: Ranks that were given up because they showed no sign of life.
    """

    code: int
    stopped_by: int | None = None
    lost: tuple[str, str] | None = None
    frozen: Sequence[Frozen] = ()


@dataclass
class Watcher:
    """Follows the output of a job and knows in the end how it went."""

    request: LaunchRequest
    console: JobConsole
    log: LogFile
    mask: Mask = field(default_factory=Mask)
    causes: list[Event] = field(default_factory=list)
    consequences: list[Event] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    left: list[Event] = field(default_factory=list)
    has_started: bool = False
    has_summary: bool = False
    has_saved: bool = False
    note: Callable[[str], None] = lambda _: None
    on_log_loss: Callable[[str], None] = lambda _: None
    stalled: dict[int, str] = field(default_factory=dict)
    _lists_missing: int | None = None
    measured: list[Event] = field(default_factory=list)
    _targets: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    _logs: dict[int, LogFile] = field(default_factory=dict)
    _are_ranks_tagged: bool = False
    _untagged: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LAST_LINES))

    def see(self, line: str) -> None:
        """Take one line of output, of one rank or of the launcher."""
        line = self.mask.hide(line)
        self.log.write(line)
        rank, text, event = parse_line(line)
        self._are_ranks_tagged |= TAG.match(line) is not None
        if event is None and rank is not None:
            self._keep_of_rank(rank, text)
            self._see_stall(rank, text)
        if event is not None:
            self._see_event(event)
        elif CHATTER.search(text):
            return  # the log has it
        elif rank is not None:
            self.console.print(tagged(rank, text))
        elif self._is_of_the_only_rank():
            self.console.print(text)
        elif text.strip():
            # Launchers speak at length of what ranks have already said; kept for when they have not.
            self._untagged.append(text)
            if killed := _killed_rank("\n".join(self._untagged)):
                self.killed.append(killed)

    def _is_of_the_only_rank(self) -> bool:
        """Whether a line without a tag is a rank's, and not its launcher's."""
        launch = self.request.job.launch
        return launch.launcher == "local" or (self.request.num_ranks == 1 and not self._are_ranks_tagged)

    def _see_stall(self, rank: int, text: str) -> None:
        """Note which ranks stay away from a collective: the engine lists them after a headline."""
        if text.strip() == "Missing ranks:":
            self._lists_missing = rank
            self.stalled.clear()
        elif self._lists_missing == rank and (found := _MISSING.match(text)):
            self.stalled[int(found[1])] = found[2]
            self.note(self._stall())
        else:
            self._lists_missing = None if self._lists_missing == rank else self._lists_missing

    def _stall(self) -> str:
        names = describe_ranks(sorted(self.stalled))
        return f"{names} stayed away from a collective that the others wait in: {min(self.stalled.values())}"

    def see_frozen(self, text: str) -> None:
        """Tell which ranks show no sign of life; nothing: they go on."""
        if text:
            self.console.print(f"warning: {text}")
            self.log.write(f"warning: {text}")
        self.note(text)

    def _see_event(self, event: Event) -> None:
        if event.kind == "targets":
            self._targets += [(address, labels) for address, labels in event.fields["targets"]]
            self._write_targets(self._targets)
        elif event.kind in ("sweep", "pair", "swept"):
            self.measured.append(event)
            self.has_summary |= event.kind == "swept"
        elif event.kind == "left":
            if not self.left:
                self.console.show(event)
            self.left.append(event)
        elif event.kind == "failure":
            (self.causes if event.fields["is_cause"] else self.consequences).append(event)
        else:
            self.has_summary |= event.kind == "summary"
            if self.stalled and event.kind in ("progress", "summary"):
                self.stalled.clear()
                self.note("")
            self.has_started |= event.kind == "started"
            self.has_saved |= event.kind == "checkpoint" and not event.fields["error"]
            self.console.show(event)

    def _write_targets(self, targets: list[tuple[str, dict[str, str]]]) -> None:
        paths = [self.request.run_dir / TARGETS_FILE]
        if (shared := self.request.job.metrics.targets_dir) is not None:
            paths.append(Path(shared) / f"{self.request.job.name}.json")
        for path in paths:
            try:
                write_targets(path, targets)
            except OSError as error:
                self.console.print(f"warning: {path} was not written for Prometheus: {error.strerror}")

    def _keep_of_rank(self, rank: int, text: str) -> None:
        """Write what a rank said to a log of its own."""
        if rank not in self._logs:
            path = self.request.log_dir / f"rank-{rank}.log"
            self._logs[rank] = LogFile(path, self.on_log_loss)
        self._logs[rank].write(text)

    def close(self) -> None:
        """Close the ranks' logs, and tell Prometheus that there is nothing left to scrape."""
        for log in self._logs.values():
            log.close()
        if self._targets:
            self._write_targets([])

    def verdict(self, ended: Ended) -> None:
        """Return when the job is done; raise the one error that explains anything else.

        Raises:
            PreemptedError: The ranks were asked to leave, and have saved.
            LaunchError: The ranks did not end well. Its exit code is that of the cause.
        """
        if self.left:
            preempted = PreemptedError(
                f"asked to leave: everything is saved at step {self.left[0].fields['step']}",
                hint="run the same job again: it goes on from there",
            )
            preempted.stopped_by = ended.stopped_by
            raise preempted
        if ended.code == 0 and self.has_summary and not self.causes:
            return
        if ended.stopped_by is not None:
            if not self.has_started:
                raise stopped_early(ended.stopped_by, self.request.attempt)
            if self.causes:
                cause = self._explain_causes()
                message = f"stopped by signal {ended.stopped_by}, and not saved: {cause.message}"
                raise _with_code(LaunchError(message, hint=cause.hint), 128 + ended.stopped_by)
            raise _with_code(
                LaunchError(
                    f"stopped by signal {ended.stopped_by}, before the ranks had saved",
                    hint="steps since the last checkpoint are lost; was launch.grace_s "
                    f"({self.request.job.launch.grace_s:g} s) too short?",
                ),
                128 + ended.stopped_by,
            )
        if ended.frozen:
            raise self._lost(
                f"{'; '.join(map(str, ended.frozen))}; the job was ended after health.stall_shutdown_s",
                ended.frozen[0].hint,
                sorted({each.host for each in ended.frozen}),
            )
        if ended.lost:
            host, why = ended.lost
            raise self._lost(
                f"{host} does not answer any more ({why}); the job was ended",
                "run it again when the host is back, or without it",
                [host],
            )
        if self.causes:
            raise self._explain_causes()
        raise self._explain_silence(ended)

    def _lost(self, message: str, hint: str, hosts: Sequence[str] = ()) -> LostError:
        error = LostError(message, hint=hint, hosts=hosts)
        error.has_saved = self.has_saved
        return error

    def _explain_silence(self, ended: Ended) -> LostError:
        if self.stalled and not self.killed:
            return self._lost(
                f"{self._stall()}; ended after health.stall_shutdown_s",
                f"what were they doing? see rank-{min(self.stalled)}.log beside "
                f"{self.log.path.name}; ranks that take different branches, or a loader that hangs, "
                "look like this",
            )
        last = "\n".join(f"    {line}" for line in self._untagged)
        told = ""
        if ended.code == 0 and not self.consequences:
            return self._lost(
                "the ranks ended with exit code 0 before training was done",
                f"does the task end the process, with os._exit for instance? see {self.log.path.name}",
            )
        if self.consequences:
            ranks = describe_ranks(sorted({event.rank for event in self.consequences}))
            told = f"; {ranks} only noticed: {self.consequences[0].fields['message']}"
        if self.killed:
            return self._lost(
                f"{self.killed[0]}, before it could say why{told}",
                f"out of memory (see dmesg), or killed by somebody; see {self.log.path.name}",
            )
        return self._lost(
            f"the launcher ended with code {ended.code} and no rank said why{told}"
            + (f"; its last words:\n{last}" if last else ""),
            f"a rank was killed, or the machine ran out of memory; see {self.log.path.name}",
        )

    def _explain_causes(self) -> LaunchError:
        first = self.causes[0].fields
        same = [event for event in self.causes if event.fields["message"] == first["message"]]
        hosts = sorted({event.fields["host"] for event in same})
        ranks = describe_ranks(sorted({event.rank for event in same}))
        message = f"{ranks} on {', '.join(hosts)}: {first['message']}"
        if first["traceback"]:
            message = f"{first['traceback'].rstrip()}\n{message}"
        return _with_code(LaunchError(message), first["exit_code"])


def stopped_early(number: int, attempt: int) -> HorovodTrainError:
    """Return the error of a run that a signal has ended before its ranks trained.

    Args:
        number: The signal.
        attempt: How often ranks of this run were started before.
    """
    if attempt:
        return stopped_between(number)
    error = LaunchError(f"stopped by signal {number}, before the ranks had begun to train")
    return _with_code(error, 128 + number)


def stopped_between(number: int) -> PreemptedError:
    """Return the error of an elastic run that a signal has ended while no ranks were there."""
    error = PreemptedError(
        "asked to leave while no ranks were running",
        hint="run the same job again: it goes on from its newest checkpoint, if there is one",
    )
    error.stopped_by = number
    return error


def _with_code(error: LaunchError, code: int) -> LaunchError:
    error.exit_code = code
    return error


# "1!: [allreduce.gradients, ...]": a rank, and what it is missing from.
_MISSING = re.compile(r"(\d+)!?: \[(.+?)(?: \.\.\.)?\]$")

# What TensorFlow tells on every rank before it can be told to be quiet.
CHATTER = re.compile(r"before absl::InitializeLog|port\.cc:\d+\] oneDNN custom operations")

# What mpirun, and horovodrun with Gloo, say of a rank that was killed.
_MPIRUN_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_GLOO_KILLED = re.compile(r"Process name: (\d+)\s+Exit code: -?(\d+)")


def _killed_rank(text: str) -> str:
    """Return which rank was killed, from a launcher's own words; empty when they do not say.

    >>> _killed_rank("mpirun noticed that process rank 1 with PID 7 on node n4 exited on signal 9 (Killed).")
    'rank 1 on n4 was killed by signal 9'
    """
    if found := _MPIRUN_KILLED.search(text):
        return f"rank {found[1]} on {found[2]} was killed by signal {found[3]}"
    if (found := _GLOO_KILLED.search(text)) and int(found[2]) > 1:
        number = int(found[2])
        return f"rank {found[1]} was killed by signal {number - 128 if number > 128 else number}"
    return ""
