"""Processes of this host: their identity, their end, cores, background threads and signals.

    own_identity, is_alive, kill           identity across hosts, containers and reuse of process IDs
    end_children                           termination of child processes
    choose_cores, bind                     binding of ranks to cores
    background_thread                      background threads
    preserved_handlers, exit_code_of       signals

Meaning of each signal:

    signal      to `horovod-train run`, or its batch scripts           to a rank
    SIGUSR1     request ranks to save and exit, wait without limit     save and exit, with all ranks
    SIGUSR2     as SIGUSR1                                             ignored
    SIGTERM     request it, kill the remaining ranks after the grace   save and exit, with all ranks
    SIGINT      as SIGTERM                                             exit at once with code 130
    SIGHUP      as SIGTERM                                             (default action)

Grid Engine sends SIGUSR2 to all processes of a job, and SIGKILL later.

After one of the last three, SIGTERM or SIGINT kills all ranks at once. A second SIGHUP has no effect,
because a closed terminal sends two.

The request to ranks is SIGUSR1: launchers forward or ignore it, whereas SIGTERM makes launchers kill their
ranks. Loader processes of a rank block SIGTERM and end with their rank. SIGINT and SIGHUP remain ignored if
they are ignored at the start, as set by `nohup` and by shells that start a program in the background.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from typing import Literal

import psutil


def boot_id() -> str:
    """Return the ID of the current boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot; None: there is no such process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def cpu_wait_s(pid: int) -> float:
    """Return the time that a process's main thread waited on a run queue, in seconds; 0: not available.

    Source: second field of /proc/<pid>/schedstat, see Documentation/scheduler/sched-stats.rst of Linux.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def own_identity() -> list[str | int | None]:
    """Return a unique, JSON-serializable identity of this process: boot, PID namespace, PID, start time."""
    return [*_place(), os.getpid(), start_ticks(os.getpid())]


def kill(identity: Sequence[str | int | None]) -> bool:
    """Kill another process of this host, given its ``own_identity``; return whether it was killed."""
    *place, pid, ticks = identity
    if not isinstance(pid, int) or pid == os.getpid() or place != _place() or ticks != start_ticks(pid):
        return False
    with suppress(OSError):  # owned by another user, or already ended
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _place() -> list[str]:
    """Return the boot ID and the PID namespace in which this process's PID is valid."""
    return [boot_id(), str(Path("/proc/self/ns/pid").readlink())]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat, from the state on; empty: there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the preceding name may contain spaces and parentheses


def end_children() -> None:
    """Terminate child processes, because mpirun waits for all processes that have this rank's output open."""
    children = [
        child for child in psutil.Process().children(recursive=True) if not _is_helper(_command_of(child))
    ]
    for signal_to in (psutil.Process.terminate, psutil.Process.kill):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                signal_to(child)
        _, children = psutil.wait_procs(children, timeout=2)


def _is_helper(command: list[str]) -> bool:
    """Return whether a process belongs to Python or Open MPI, and exits after this process on its own."""
    return "multiprocessing.resource_tracker" in " ".join(command) or Path(*command[:1]).name == "orted"


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


NODES = Path("/sys/devices/system/node")
# Variables of launchers with the local rank and the number of ranks of the host.
_LOCAL = (
    ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra
)


def choose_cores(
    mode: Literal["auto", "none", "cores", "numa"],
    nodes: Sequence[Sequence[int]],
    allowed: frozenset[int],
    local_rank: int,
    local_size: int,
) -> frozenset[int] | None:
    """Return the cores of a rank; None: the rank is not bound.

    Args:
        mode: The job's ``launch.cpu_binding``.
        nodes: Cores of each NUMA node of the host.
        allowed: Cores that the launcher or the container allows for this process.
        local_rank: Rank on its host.
        local_size: Number of ranks on the host.
    """
    usable = [cores for node in nodes if (cores := [core for core in node if core in allowed])]
    if mode == "auto":
        mode = "numa" if len(usable) > 1 else "none"
    if mode == "none" or local_size < 2 or len(allowed) < local_size:
        return None
    if mode == "numa":
        if len(usable) < 2 or local_size < len(usable):
            return None
        return frozenset(usable[local_rank * len(usable) // local_size])
    # Adjacent cores in this order are in the same NUMA node.
    ordered = [core for node in usable for core in node] or sorted(allowed)
    first, last = (number * len(ordered) // local_size for number in (local_rank, local_rank + 1))
    return frozenset(ordered[first:last])


def bind(mode: Literal["auto", "none", "cores", "numa"], environ: Mapping[str, str] = os.environ) -> None:
    """Bind this process to cores, according to the environment variables of its launcher.

    Without binding, threads migrate between cores and NUMA nodes, which reduces memory bandwidth. Each rank
    binds itself before any library starts threads, so that the binding is the same under every launcher.
    """
    for rank, size in _LOCAL:
        if rank in environ and size in environ:
            allowed = frozenset(os.sched_getaffinity(0))
            chosen = choose_cores(mode, read_nodes(NODES), allowed, int(environ[rank]), int(environ[size]))
            if chosen is not None:
                os.sched_setaffinity(0, chosen)
            return


def read_nodes(folder: Path) -> list[list[int]]:
    """Return the cores of each NUMA node; empty if the system does not provide them."""
    files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:]))
    return [cores_of(file.read_text()) for file in files]


def cores_of(text: str) -> list[int]:
    """Return the cores of a list in the format of the kernel.

    >>> cores_of("0-2,8")
    [0, 1, 2, 8]
    """
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found


@contextmanager
def background_thread(work: Callable[[Event], None]) -> Iterator[None]:
    """Run ``work`` in a thread during the block. It must return soon after its argument, an event, is set."""
    over = Event()
    thread = Thread(target=work, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


DRAIN_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""To a launcher process: request ranks to save and exit, and wait without limit."""

TIMED_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""To a launcher process: request ranks to save and exit, and kill the remaining ranks after the grace."""

LAUNCH_SIGNALS = (*DRAIN_SIGNALS, *TIMED_STOP_SIGNALS)
"""Signals that end a run."""

KILLS_AT_ONCE = frozenset({signal.SIGTERM, signal.SIGINT})
"""To a launcher process after one of ``TIMED_STOP_SIGNALS``: kill all ranks at once."""

STAY_IGNORED = frozenset({signal.SIGINT, signal.SIGHUP})
"""Signals without a handler if they are ignored when the program starts."""

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""To a rank: save and exit."""

SIGNAL_TO_RANKS = signal.SIGUSR1
"""The launcher's request to ranks."""

SENT_TO_END: Mapping[Literal["drain", "stop", "kill"], tuple[signal.Signals, ...]] = {
    "drain": (signal.SIGUSR2, signal.SIGCONT),  # SIGUSR1 is Slurm's warning of the time limit: it requeues
    "stop": (signal.SIGTERM, signal.SIGCONT),
    "kill": (signal.SIGTERM, signal.SIGTERM, signal.SIGCONT),
}
"""Signals that `horovod-train drain` and `cancel` send to the launcher process of a job, in order.

SIGCONT is required because a stopped process (Ctrl-Z) handles signals only after it continues.
"""


@contextmanager
def preserved_handlers(numbers: Collection[int]) -> Iterator[None]:
    """Keep signals and their Python handlers from a library that initializes during the block.

    Its threads do not receive the signals, which would interrupt their system calls. Handlers that it
    installs are replaced: MPICH takes SIGUSR1 as the failure of a process, and then fails under Slurm.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        if current_thread() is main_thread():  # only it may set handlers
            for number in numbers:
                if (handler := signal.getsignal(number)) is not None:
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_code_of(number: int) -> int:
    """Return the exit code of a process that was ended by a signal, as shells define it."""
    return 128 + number
