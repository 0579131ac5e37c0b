"""The outcome of a run.

    Outcome                      follower that determines the outcome
    Ended                        how the command that started the ranks ended
    killed_rank, aborted_rank    messages of launchers about ranks that were killed or that called MPI_Abort
    MpiErrors                    messages of MPI libraries about ranks that MPI has ended

A run ends with success, or with one error that states the cause.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from signal import SIGTERM, SIGVTALRM

from horovod_train.errors import (
    GpuError,
    HorovodTrainError,
    LaunchError,
    LostError,
    NcclError,
    PreemptedError,
    describe_ranks,
)
from horovod_train.events.types import (
    BenchmarkDone,
    CheckpointWritten,
    Failure,
    Preempted,
    ScriptDone,
    Started,
    Summary,
)
from horovod_train.events.wire import Line
from horovod_train.launch.supervise.follow import CHATTER, Follower, Frozen, Stalls
from horovod_train.system.processes import DRAIN_SIGNALS, exit_code_of


@dataclass(frozen=True)
class Killed:
    """A rank, or a process on a host, that was killed by a signal. ``rank`` -1 or ``pid`` 0: unknown.

    MPICH names a process only, and the first one of a host: before MPI is initialized, it may have killed
    that one itself.
    """

    signal: int
    rank: int = -1
    pid: int = 0
    host: str = ""

    def text(self, ranks: Mapping[int, int], *, has_started: bool = True) -> str:
        """Return a description.

        Args:
            ranks: Ranks by PID, for a launcher that does not name the rank.
            has_started: Whether training has begun.

        >>> Killed(9, pid=7, host="n4").text({7: 1})
        'rank 1 on n4 was killed by signal 9'
        """
        rank = self.rank if self.rank >= 0 else ranks.get(self.pid, -1)
        who = f"rank {rank}" if rank >= 0 else f"process {self.pid}"
        if self.rank < 0 and not has_started:
            named = f"mpirun names {who} and signal {self.signal}, but may have killed that one itself"
            return f"a rank on {self.host} was killed ({named})"
        return f"{who}{f' on {self.host}' if self.host else ''} was killed by signal {self.signal}"


# Open MPI 4 and 5; Intel MPI; MPICH, which names the process only; Slurm; horovodrun with Gloo.
_OPEN_MPI = re.compile(r"process rank (\d+) with PID (\d+) on node (\S+)\s+exited on\s+signal (\d+)")
_INTEL = re.compile(r"RANK (\d+) PID (\d+) RUNNING AT (\S+)\s+=\s+KILLED BY SIGNAL: (\d+)")
# MPICH 3.4 and later print the wait status of a rank that a signal has killed; earlier versions print
# exit codes, too, usually 1 or 2.
_MPICH = re.compile(r"=\s+PID (\d+) RUNNING AT (\S+)(?:(?! PID )[\s\S])*=\s+EXIT CODE: (?!1\b|2\b)(\d+)")
_SLURM = re.compile(r"srun: error: (\S+): tasks? (\d+)[\d,-]*: (Killed|Segmentation fault|Bus error|Aborted)")
_GLOO = re.compile(r"Process name: (\d+)\s+Exit code: -?(\d+)")
_SIGNALS = {"Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6}

_ABORTED = (
    re.compile(r"MPI_ABORT was invoked on rank (\d+) in communicator[\s\S]*?[Ee]rrorcode:? (-?\d+)"),
    re.compile(r"application called MPI_Abort\(MPI_COMM_WORLD, (?P<code>-?\d+)\) - process (?P<rank>\d+)"),
)

LOST_CONNECTION = "*** An error occurred in Socket closed"
"""Message of a rank that has lost the connection to another one (Open MPI over TCP)."""

# Begins of messages with which MPI libraries end a rank.
_FATAL = re.compile(
    rf"{re.escape(LOST_CONNECTION)}|\*\*\* An error occurred in MPI_|It looks like MPI_INIT failed"
    r"|MPI_ABORT was invoked|Abort\(-?\d+\) on node|Fatal error in (?:P?MPI_|internal_)"
    r"|No components were able to be opened|PML add procs failed"
)
MAX_LINES = 10


class MpiErrors:
    """Collects the messages with which an MPI library has ended a rank, from the lines of ranks and launcher.

    Attributes:
        rank: Rank of the first message; None: the launcher wrote it, or there is none.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self._lines: list[str] = []
        self._is_begun = False

    def add(self, rank: int | None, text: str) -> None:
        """Process one line."""
        if not self._is_begun and _FATAL.search(text):
            self._is_begun, self.rank = True, rank
        if self._is_begun and rank == self.rank and len(self._lines) < MAX_LINES and text.strip("-\0 "):
            self._lines.append(text.rstrip())

    def __str__(self) -> str:
        return "\n".join(self._lines)


def killed_rank(text: str) -> Killed | None:
    """Return which rank was killed, from messages of the launcher; None: they name none.

    Ranks that Intel MPI has ended with SIGVTALRM (``launch/mpi.py``) are not meant.

    >>> killed_rank("mpirun noticed that process rank 1 with PID 7 on node n4 exited on signal 9 (Killed).")
    Killed(signal=9, rank=1, pid=7, host='n4')
    """
    for each in (*_OPEN_MPI.finditer(text), *_INTEL.finditer(text)):
        if int(each[4]) != SIGVTALRM:
            return Killed(int(each[4]), int(each[1]), int(each[2]), each[3])
    if found := _MPICH.search(text):
        return Killed(int(found[3]) & 0x7F, pid=int(found[1]), host=found[2])
    if found := _SLURM.search(text):
        return Killed(_SIGNALS[found[3]], int(found[2]), host=found[1])
    if (found := _GLOO.search(text)) and int(found[2]) > 1:
        number = int(found[2])
        return Killed(number - 128 if number > 128 else number, int(found[1]))
    return None


def aborted_rank(text: str) -> tuple[int, int] | None:
    """Return the rank that called MPI_Abort, and its error code; None: the text names none.

    >>> aborted_rank("Abort(5) on node 1: application called MPI_Abort(MPI_COMM_WORLD, 5) - process 1")
    (1, 5)
    """
    for pattern in _ABORTED:
        if found := pattern.search(text):
            named = found.groupdict() or {"rank": found[1], "code": found[2]}
            return int(named["rank"]), int(named["code"])
    return None


NUM_LAST_LINES = 20
KILLED_CODES = {1, 9, 137, 143, 255}
"""Exit codes of launchers after a rank was killed."""


@dataclass(frozen=True)
class Ended:
    """How the command that started the ranks ended.

    Attributes:
        code: Its exit code.
        stopped_by: Signal that the launcher received; None if the command exited by itself.
        lost: Host that does not respond, and the evidence; None if all respond.
        frozen: Ranks without heartbeat for ``health.stall_shutdown_s``.
        ranks: Ranks by PID, because some launchers name a killed process only.
    """

    code: int
    stopped_by: int | None = None
    lost: tuple[str, str] | None = None
    frozen: Sequence[Frozen] = ()
    ranks: Mapping[int, int] = field(default_factory=dict)


class Outcome(Follower):
    """Follower that determines the outcome of a run from events and messages of the launcher.

    Args:
        stalls: Ranks that are missing from a collective.
        log_name: Name of the run's log, for error messages.
        grace_s: Grace period for saving, in seconds.
        attempt: Number of earlier attempts of this run.
        is_script: Whether the job is a script, which handles signals itself.
    """

    def __init__(
        self, stalls: Stalls, log_name: str, grace_s: float, attempt: int, *, is_script: bool = False
    ) -> None:
        self._stalls = stalls
        self._log_name = log_name
        self._grace_s = grace_s
        self._attempt = attempt
        self._is_script = is_script
        self._has_started = False
        self._has_saved = False
        self._is_done = False
        self._preempted: Preempted | None = None
        self._causes: list[tuple[int, Failure]] = []
        self._consequences: list[tuple[int, Failure]] = []
        self._killed: Killed | None = None
        self._mpi_errors = MpiErrors()
        self._last_words: deque[str] = deque(maxlen=NUM_LAST_LINES)

    def handle(self, line: Line) -> None:
        match line.event:
            case None:
                self._mpi_errors.add(line.rank, line.text)
                if line.is_launchers and line.text.strip() and not CHATTER.search(line.text):
                    self._parse_launcher_line(line.text)
            case Started():
                self._has_started = True
            case CheckpointWritten(error=""):
                self._has_saved = True
            case Preempted() as event:
                self._preempted = self._preempted or event
            case Failure() as event:
                (self._causes if event.is_cause else self._consequences).append((line.rank or 0, event))
            case Summary() | BenchmarkDone() | ScriptDone():
                self._is_done = True

    def _parse_launcher_line(self, text: str) -> None:
        # Used only if no rank has reported a cause, because launchers repeat the errors of ranks at length.
        self._last_words.append(text)
        self._killed = self._killed or killed_rank("\n".join(self._last_words))

    def check(self, ended: Ended) -> None:
        """Return if the job succeeded; otherwise, raise one error with the cause.

        Raises:
            PreemptedError: The ranks were preempted, and have saved a checkpoint.
            LaunchError: The ranks failed; the exit code is that of the cause.
        """
        if self._preempted is not None:
            preempted = PreemptedError(
                f"preempted: everything is saved at step {self._preempted.step}",
                hint="run the same job again: it resumes from there",
            )
            preempted.stopped_by = ended.stopped_by
            raise preempted
        # A script that ends with os._exit(0) sends no ``ScriptDone``.
        is_done = self._is_done or (self._is_script and not self._consequences)
        if ended.code == 0 and is_done and not self._causes:
            return
        if ended.stopped_by is not None:
            stopped = self._explain_stop(ended.stopped_by)
            if isinstance(stopped, LaunchError):
                stopped.was_stopped = True
            raise stopped
        if ended.frozen:
            raise self._lost(
                f"{'; '.join(map(str, ended.frozen))}; the job was ended after health.stall_shutdown_s",
                ended.frozen[0].hint,
                sorted({each.host for each in ended.frozen}),
                ranks=sorted({each.rank for each in ended.frozen}),
            )
        if ended.lost:
            host, why = ended.lost
            raise self._lost(
                f"{host} does not answer any more ({why}); the job was ended",
                "run it again when the host is back, or without it",
                [host],
            )
        if self._causes:
            raise self._explain_causes()
        raise self._explain_silence(ended)

    def _explain_stop(self, number: int) -> HorovodTrainError:
        if self._is_script and not self._causes:
            # Every kind of preemption sends SIGTERM to a script.
            number = SIGTERM if number in DRAIN_SIGNALS else number
            stopped = LaunchError(
                f"stopped by signal {number}: the script received SIGTERM, and has ended",
                hint="a script that saves on SIGTERM, and exits with code 75, counts as preempted",
            )
            return _with_code(stopped, exit_code_of(number))
        if not self._has_started:
            return stopped_early(number, self._attempt)
        if self._causes:
            cause = self._explain_causes()
            stopped = LaunchError(
                f"stopped by signal {number}, and not saved: {cause.message}", hint=cause.hint
            )
            stopped.cause = cause.cause
        else:
            stopped = self._explain_unsaved(number)
        # A drain that could not save has failed; the job was not cancelled.
        return stopped if number in DRAIN_SIGNALS else _with_code(stopped, exit_code_of(number))

    def _explain_unsaved(self, number: int) -> LaunchError:
        if self._stalls.missing:
            return self._lost(
                f"stopped by signal {number}, before the ranks had saved: {self._stalls}",
                "; ".join(filter(None, [self._stalls.diagnosis, "steps since the last checkpoint are lost"])),
                ranks=sorted(self._stalls.missing),
            )
        too_short = f"; was launch.grace_s ({self._grace_s:g} s) too short?"
        return LaunchError(
            f"stopped by signal {number}, before the ranks had saved",
            hint="steps since the last checkpoint are lost" + ("" if number in DRAIN_SIGNALS else too_short),
        )

    def _explain_silence(self, ended: Ended) -> LostError:
        code = ended.code
        if self._stalls.missing and not self._killed:
            return self._lost(
                f"{self._stalls}; ended after health.stall_shutdown_s",
                f"{self._stalls.diagnosis or 'what were they doing?'}; see "
                f"rank-{min(self._stalls.missing)}.log next to {self._log_name}; usual causes: ranks take "
                "different branches, or a loader hangs",
                ranks=sorted(self._stalls.missing),
            )
        if code == 0 and not self._consequences:
            return self._lost(
                "the ranks ended with exit code 0 before training was done",
                f"does the task end the process, with os._exit for instance? see {self._log_name}",
            )
        noticed = ""
        if self._consequences:
            ranks = describe_ranks(sorted({rank for rank, _ in self._consequences}))
            noticed = f"; {ranks} failed as a consequence: {self._consequences[0][1].message}"
        if self._consequences and not self._killed and self._are_nccl_errors:
            error = self._lost(
                f"{ranks}: {self._consequences[0][1].message}\nno rank says that it has failed itself",
                "a link or an interface between hosts, perhaps: NCCL_DEBUG=INFO in launch.env shows more",
            )
            error.cause = NcclError.cause
            return error
        if self._killed is not None:
            text = self._killed.text(ended.ranks, has_started=self._has_started)
            return self._lost(
                f"{text}, before it could say why{noticed}",
                f"out of memory (see dmesg), or killed by a user; see {self._log_name}",
                ranks=[int(number) for number in re.findall(r"^rank (\d+)", text)],
            )
        if words := str(self._mpi_errors):
            return self._explain_mpi(words, noticed, ended)
        last = "\n".join(f"    {line}" for line in self._last_words)
        was_killed = "a rank was killed, or the machine ran out of memory"
        if code not in KILLED_CODES:  # Hydra may lose the last lines of a rank that calls MPI_Abort
            was_killed = f"a rank exited with code {code}, or called MPI_Abort with it"
        # If no rank has started, and the launcher has printed messages, these contain the reason.
        no_ranks = "no rank had begun to train; `horovod-train doctor` checks the launcher and the hosts"
        return self._lost(
            f"the launcher ended with code {code} and no rank said why{noticed}"
            + (f"; its last words:\n{last}" if last else ""),
            f"{was_killed if self._has_started or noticed or not last else no_ranks}; see {self._log_name}",
        )

    def _explain_mpi(self, words: str, noticed: str, ended: Ended) -> LostError:
        """Return the error for messages with which the MPI library has ended a rank."""
        if (found := aborted_rank(words)) is not None:
            rank, error_code = found
            return self._lost(
                f"rank {rank} called MPI_Abort with error code {error_code}{noticed}",
                f"rank-{rank}.log next to {self._log_name} may have the reason",
                ranks=[rank],
            )
        of_rank = self._mpi_errors.rank
        who = "the ranks" if of_rank is None else f"rank {of_rank}"
        lines = "\n".join(f"    {line}" for line in words.splitlines())
        if LOST_CONNECTION in words:
            silent = sorted({*ended.ranks.values()} - {of_rank, *(rank for rank, _ in self._consequences)})
            gone = f"rank {silent[0]}" if len(silent) == 1 else "a rank"
            return self._lost(
                f"{who} lost the connection to {gone}, which has left no message{noticed}:\n{lines}",
                "that rank was killed, its host is out of memory (see dmesg), or a link has failed; see "
                f"{self._log_name}",
                ranks=silent if len(silent) == 1 else [],
            )
        return self._lost(
            f"MPI has ended {who}{noticed}; its message:\n{lines}",
            f"`horovod-train doctor` tests MPI between the hosts; see {self._log_name}",
            ranks=[] if of_rank is None else [of_rank],
        )

    @property
    def _are_nccl_errors(self) -> bool:
        """Whether all failures are NCCL errors. An exited rank and a failed link cause the same errors."""
        return all(failure.cause == NcclError.cause for _, failure in self._consequences)

    def _explain_causes(self) -> LaunchError:
        first = self._causes[0][1]
        same = [(rank, failure) for rank, failure in self._causes if failure.message == first.message]
        hosts = sorted({failure.host for _, failure in same})
        ranks = describe_ranks(sorted({rank for rank, _ in same}))
        message = f"{ranks} on {', '.join(hosts)}: {first.message}"
        if first.traceback:
            message = f"{message}\n{first.traceback.rstrip()}"
        error = LaunchError(message)
        error.cause = first.cause or error.cause
        error.step, error.has_saved, error.failure = first.step, self._has_saved, first.message
        if error.cause == GpuError.cause:
            error.hosts = hosts
        return _with_code(error, first.exit_code)

    def _lost(
        self, message: str, hint: str, hosts: Sequence[str] = (), *, ranks: Sequence[int] = ()
    ) -> LostError:
        error = LostError(message, hint=hint, hosts=hosts)
        error.lost_ranks = ranks
        error.has_saved = self._has_saved
        return error


def stopped_early(number: int, attempt: int) -> HorovodTrainError:
    """Return the error of a run that was stopped by a signal before training began in this attempt."""
    if attempt:
        return stopped_between(number)
    error = LaunchError(f"stopped by signal {number}, before the ranks had begun to train")
    error.was_stopped = True
    return _with_code(error, exit_code_of(number))


def stopped_between(number: int, failure: str = "") -> PreemptedError:
    """Return the error of a run that was stopped between two attempts, the last of which has failed."""
    error = PreemptedError(
        "preempted while no ranks were running" + (f", after: {failure.splitlines()[0]}" if failure else ""),
        hint="run the same job again: it resumes from its newest checkpoint, if there is one",
    )
    error.stopped_by = number
    return error


def _with_code(error: LaunchError, code: int) -> LaunchError:
    error.exit_code = code
    return error
