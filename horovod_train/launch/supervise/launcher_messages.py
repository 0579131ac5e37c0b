"""Messages of launchers and MPI libraries about ranks that were killed, or that MPI has ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from signal import SIGVTALRM


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

    Ranks that Intel MPI has ended with SIGVTALRM (``launch/mpi/hydra.py``) are not meant.

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
