"""Watchdog threads of a rank: long waits for data, a device or other ranks, and heartbeats of other ranks.

    DataWatch, DeviceWatch, JoinWatch   watchdogs of long waits for data, of a GPU, and for ranks to join
    Heartbeat                           heartbeats of this rank, and what it does, in files
    PeerWatch                           heartbeats of other ranks, for jobs without agents

Heartbeats are independent of MPI and Gloo. A frozen rank sends none. If a process is stopped, swaps, or is
blocked in a network file system, its Horovod background thread is blocked, too, and so is Horovod's stall
inspector. Therefore, each rank has a thread: if ``horovod-train run`` started the rank, that of
``Heartbeat``, otherwise that of ``PeerWatch``.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep

import psutil

from horovod_train.collectives.base import Communicator, DeviceWork, allgather_json, broadcast_json
from horovod_train.config.schema import Health
from horovod_train.errors import GpuError, HorovodTrainError, LostError, NcclError, PeerError, result_of
from horovod_train.system.files import write_atomic
from horovod_train.system.processes import kill, own_identity
from horovod_train.system.stacks import REQUEST_FILE, answer_file, dump_on_signal, threads_of_process

INTERVAL_S = 0.5
"""Time between two checks for a wait."""


@dataclass(frozen=True)
class Wait:
    """A wait that has not ended.

    Attributes:
        since_s: Start of the wait (``monotonic``), which identifies it.
        shutdown_s: Length of a wait that ends the rank, in seconds.
        report: Returns a human-readable sentence, given the length of the wait in seconds.
        error: Returns the error that ends the rank, given the length of the wait in seconds.
    """

    since_s: float
    shutdown_s: float
    report: Callable[[float], str]
    error: Callable[[float], HorovodTrainError]


class WaitWatch:
    """Watchdog that reports each long wait once, and ends the rank if a wait is too long.

    Args:
        current_wait: Returns the current wait; None: this rank does not wait.
        health: Time after which to warn.
        warn: Prints a warning.
        end: Ends this process with an error, because the main thread is blocked.
    """

    def __init__(
        self,
        current_wait: Callable[[], Wait | None],
        health: Health,
        warn: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        self._current_wait = current_wait
        self._interval_s = INTERVAL_S
        self._warning_s = health.stall_warning_s
        self._warn = warn
        self._end = end
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the watchdog. Idempotent."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        since_s, elapsed_s, is_reported = None, 0.0, False
        while not self._over.wait(self._interval_s):
            wait = self._current_wait()
            if wait is None or wait.since_s != since_s:
                since_s, elapsed_s, is_reported = None if wait is None else wait.since_s, 0.0, False
                continue
            elapsed_s += self._interval_s  # a clock would also run while this process is stopped
            if elapsed_s >= min(self._warning_s, wait.shutdown_s) and not is_reported:
                is_reported = True
                self._warn(wait.report(elapsed_s))
            if elapsed_s >= wait.shutdown_s:
                self._end(wait.error(elapsed_s))
                return


HANG = "a loader process, the disk or the dataset's __getitem__ hangs"
SLOW = "the store or the network is slow"


class DataWatch(WaitWatch):
    """Watchdog that reports a long wait for data, and ends the rank if the wait is too long.

    Other ranks detect a rank whose loader hangs, because they wait for it in a collective. They cannot do
    so if there is only one rank, or if the loaders of all ranks hang.

    Args:
        world: The communicator. If it has other ranks, this rank ends later, so that they report first.
        health: Times after which to warn, and after which to end the rank.
        waiting_since_s: Returns the start of the current wait for data; None: not waiting.
        waiting_for: Returns what is being waited for, such as a file; empty: unknown.
        warn: Prints a warning.
        end: Ends this process with an error.
    """

    def __init__(
        self,
        world: Communicator,
        health: Health,
        waiting_since_s: Callable[[], float | None],
        waiting_for: Callable[[], str],
        warn: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        self._rank = world.rank
        self._factor = 1.0 if world.size == 1 else 1.5
        self._shutdown_s = health.stall_shutdown_s * self._factor
        self._waiting_since_s, self._waiting_for = waiting_since_s, waiting_for
        super().__init__(self._wait, health, warn, end)

    def _wait(self) -> Wait | None:
        since_s = self._waiting_since_s()
        return None if since_s is None else Wait(since_s, self._shutdown_s, self._report, self._error)

    def _state(self, elapsed_s: float) -> tuple[str, str]:
        """Return what the rank waits for, and a possible reason."""
        what = self._waiting_for()
        text = f"rank {self._rank} has waited for {what or 'its data'} for {elapsed_s:.0f} s"
        return text, SLOW if what else HANG

    def _report(self, elapsed_s: float) -> str:
        text, reason = self._state(elapsed_s)
        return f"{text}: perhaps {reason}"

    def _error(self, elapsed_s: float) -> LostError:
        text, reason = self._state(elapsed_s)
        factor = "" if self._factor == 1 else f"{self._factor} x "
        return LostError(
            f"{text}, and was ended after {factor}health.stall_shutdown_s",
            hint=f"{reason}; set health.stall_shutdown_s higher if it is only slow",
        )


# The rank that is the cause reports before the ranks that wait for it.
COURTESY_S = 10.0
NCCL_DEBUG_HINT = "NCCL_DEBUG=INFO in launch.env shows more"


class DeviceWatch(WaitWatch):
    """Watchdog that reports a GPU that hangs, and ends the rank if it hangs for too long.

    The host queues work on a GPU and reads results some steps later. Horovod's stall inspector monitors
    only the requests of hosts, so it does not detect a GPU that hangs in a kernel, or in an all-reduce
    because of the network or another GPU. The watchdog detects that the host waits, and in which phase of
    the step the GPU is.
    """

    def __init__(
        self,
        world: Communicator,
        health: Health,
        warn: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        self._world = world
        self._shutdown_s = health.stall_shutdown_s
        super().__init__(self._wait, health, warn, end)

    def _wait(self) -> Wait | None:
        work, since_s = self._world.waiting_in, self._world.waiting_since_s
        if not isinstance(work, DeviceWork) or since_s is None:
            return None
        return Wait(
            since_s,
            self._shutdown_s + (COURTESY_S if work.is_collective else 0.0),
            lambda elapsed_s: f"{_state_of(work, elapsed_s)}: {_reason_for(work)}",
            lambda elapsed_s: _error_of(work, elapsed_s),
        )


def _state_of(work: DeviceWork, elapsed_s: float) -> str:
    if work.is_collective:
        return f"this rank's GPU has waited in an all-reduce for {elapsed_s:.0f} s"
    return f"this rank's GPU has been in one step's {work.phase() or 'end'} for {elapsed_s:.0f} s"


def _reason_for(work: DeviceWork) -> str:
    if work.is_collective:
        return f"another rank's GPU has not started it, or the network is blocked ({NCCL_DEBUG_HINT})"
    return "a kernel hangs, or the step is long: see `nvidia-smi`, and XID in `dmesg`"


def _error_of(work: DeviceWork, elapsed_s: float) -> HorovodTrainError:
    state = f"{_state_of(work, elapsed_s)}; ended after health.stall_shutdown_s"
    if not work.is_collective:
        return GpuError(state, hint="see `nvidia-smi`, and XID in the kernel's log (`dmesg | grep -i xid`)")
    error = PeerError(state, hint=f"check links and interfaces between hosts: {NCCL_DEBUG_HINT}")
    error.cause = NcclError.cause
    return error


# A rank that has not joined may still be importing packages from a slow disk.
MIN_SHUTDOWN_S = 600.0


class JoinWatch(WaitWatch):
    """Watchdog that reports a long wait for other ranks to join, and ends the rank if it is too long.

    ``MPI_Init`` has no timeout.
    """

    def __init__(
        self, health: Health, warn: Callable[[str], None], end: Callable[[HorovodTrainError], None]
    ) -> None:
        shutdown_s = max(health.stall_shutdown_s, MIN_SHUTDOWN_S)
        wait = Wait(monotonic(), shutdown_s, self._report, self._error)
        super().__init__(lambda: wait, health, warn, end)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()

    def _state(self, elapsed_s: float) -> str:
        return f"this rank has waited for {elapsed_s:.0f} s for the others to join"

    def _report(self, elapsed_s: float) -> str:
        return f"{self._state(elapsed_s)}: check that all were started, and that none is stopped or slow"

    def _error(self, elapsed_s: float) -> LostError:
        limit = f"health.stall_shutdown_s (at least {MIN_SHUTDOWN_S:g} s)"
        return LostError(f"{self._state(elapsed_s)}; ended after {limit}")


HEARTBEAT_INTERVAL_S = 0.5
NUM_WATCHED = 2
MAX_BYTES = 64
LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104  (the address by which other hosts reach this one is unknown)


class Heartbeat:
    """Thread that writes the time to a heartbeat file until the process exits, and says what this rank does.

    The file also has the time since when this rank waits in a collective, or zero.
    If ``horovod-train run`` started the rank, the agent on the host reads the files
    (``launch/hosts/agent.py``).

    The agent deletes the heartbeat file when the process has ended: a rank may also freeze while it exits.

    Args:
        folder: The stage folder of the run on this host (``heartbeat_dir``).
        rank: This rank.

    Attributes:
        describe: Returns what this rank does, as plain values, for reports about hangs.
        step: Returns the number of steps that are done; None: training has not begun.
        waiting_since_s: Returns since when this rank waits in a collective; None: it does not.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.describe: Callable[[], Mapping[str, object]] = dict
        self.step: Callable[[], int | None] = lambda: None
        self.waiting_since_s: Callable[[], float | None] = lambda: None
        self._folder, self._rank = folder, rank
        self._request: object = self._read_request()
        dump_on_signal(folder, rank)
        Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def _beat(self) -> None:
        path = self._folder / heartbeat_file(self._rank, os.getpid())
        step, since_s = self.step(), monotonic()
        # If the folder is missing or the disk is full, this rank is not monitored, but training continues.
        with suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                # Time since boot: equal in all processes of the host, and unaffected by clock changes.
                now_s = monotonic()
                waiting_since_s = self.waiting_since_s() or 0.0
                os.pwrite(file.fileno(), f"{now_s:020.3f} {waiting_since_s:020.3f}\n".encode(), 0)
                if step != self.step():
                    step, since_s = self.step(), now_s
                if (request := self._read_request()) != self._request:
                    self._request = request
                    # A full disk, or an object that cannot be described, must not end the heartbeat.
                    result_of(partial(self._answer, str(request), now_s - since_s))
                sleep(HEARTBEAT_INTERVAL_S)

    def _read_request(self) -> str | None:
        return result_of((self._folder / REQUEST_FILE).read_text)[0]

    def _answer(self, request: str, step_s: float) -> None:
        found, error = result_of(self.describe)
        document = {
            "request": request, "step": self.step(), "step_s": step_s, "stacks": threads_of_process(),
            **(found if error is None and found is not None else {"error": str(error)}),
        }  # fmt: skip
        write_atomic(self._folder / answer_file(self._rank, os.getpid()), json.dumps(document))


def heartbeat_file(rank: int, pid: int) -> str:
    """Return the name of a rank's heartbeat file.

    >>> heartbeat_file(3, 4711)
    'alive-3-4711'
    """
    return f"alive-{rank}-{pid}"


class PeerWatch:
    """Watchdog that monitors the heartbeats of peer ranks, for jobs without agents.

    Its thread sends UDP datagrams to two other ranks, and monitors the two predecessors in the ring of
    ranks. If one of them sends none for ``health.stall_shutdown_s`` while this rank waits in a collective,
    this rank exits with an error, which ends the job. With Gloo, it first kills a frozen rank on the same
    host, because horovodrun waits five seconds for each remaining rank to exit, and ten seconds for a
    frozen rank.

    Args:
        world: The communicator. Construction is collective.
        health: Times after which to warn, and after which to end the rank.
        warn: Prints a warning. Called once for each rank whose heartbeat is missing.
        end: Ends this process with an error.
    """

    def __init__(
        self,
        world: Communicator,
        health: Health,
        warn: Callable[[str], None],
        end: Callable[[HorovodTrainError], None],
    ) -> None:
        # Heartbeats may be delayed: a few missing heartbeats are tolerated.
        self._warning_s = max(health.stall_warning_s, 4 * HEARTBEAT_INTERVAL_S)
        self._shutdown_s = max(health.stall_shutdown_s, 8 * HEARTBEAT_INTERVAL_S)
        self._world = world
        self._warn = warn
        self._end = end
        self._over = Event()
        hosts = allgather_json(world, world.host)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.settimeout(HEARTBEAT_INTERVAL_S / 2)
        self._socket.bind((LOOPBACK if len(set(hosts)) == 1 else EVERYWHERE, 0))
        # Rejects datagrams that are not from ranks of this job.
        self._token = str(broadcast_json(world, secrets.token_hex(8)))
        me = [_addresses(hosts), self._socket.getsockname()[1], own_identity()]
        places = allgather_json(world, me)
        self._rank = world.rank
        distances = range(1, min(NUM_WATCHED, world.size - 1) + 1)
        self._targets = [places[(world.rank + distance) % world.size][:2] for distance in distances]
        before = [(world.rank - distance) % world.size for distance in distances]
        self._hosts = {rank: hosts[rank] for rank in before}
        self._processes = {rank: places[rank][2] for rank in before}
        self._last_heartbeat_s = dict.fromkeys(self._hosts, monotonic())
        self._named: set[int] = set()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop monitoring, and notify the peers that this rank exits. Idempotent."""
        if not self._over.is_set():
            self._over.set()
            with suppress(OSError):  # wake the thread, which waits for a datagram
                self._socket.sendto(b"", (LOOPBACK, self._socket.getsockname()[1]))
            self._thread.join()
            for _ in range(3):  # datagrams may be lost
                self._send("left")
            self._socket.close()

    def _watch(self) -> None:
        looked_s = monotonic()
        while not self._over.is_set():
            self._send("here")
            self._receive()
            now_s = monotonic()
            if now_s - looked_s > 4 * HEARTBEAT_INTERVAL_S:
                # This process was stopped, so the missing heartbeats of this time do not count.
                self._last_heartbeat_s = dict.fromkeys(self._last_heartbeat_s, now_s)
            looked_s = now_s
            self._judge(now_s)

    def _judge(self, now_s: float) -> None:
        waiting_since_s = self._world.waiting_since_s  # peers are checked only while this rank waits
        if waiting_since_s is None:
            return
        waiting_in = self._world.waiting_in
        where = f" in {waiting_in}" if waiting_in is not None else ""
        for rank, heartbeat_s in self._last_heartbeat_s.items():
            silent_s = now_s - max(heartbeat_s, waiting_since_s)
            what = f"rank {rank} on {self._hosts[rank]} has shown no sign of life for {silent_s:.0f} s"
            if silent_s > self._warning_s and rank not in self._named:
                self._named.add(rank)
                self._warn(
                    f"{what}, and this rank waits for it{where}: was it stopped, does its host swap or hang?"
                )
            if silent_s > self._shutdown_s:
                # Not with MPI: mpirun ends the frozen rank, and would report this SIGKILL as the exit code.
                if os.environ.get("HOROVOD_CONTROLLER") == "gloo" and kill(self._processes[rank]):
                    what += " and was killed"
                self._end(LostError(f"{what}; ended after health.stall_shutdown_s"))

    def _send(self, word: str) -> None:
        data = f"{self._token} {self._rank} {word}".encode()
        for addresses, port in self._targets:
            for address in addresses:
                with suppress(OSError):  # if the network is down, the peer reports this rank
                    self._socket.sendto(data, (address, port))

    def _receive(self) -> None:
        """Receive heartbeats for one interval."""
        until_s = monotonic() + HEARTBEAT_INTERVAL_S
        while monotonic() < until_s and not self._over.is_set():
            try:
                token, rank, word = self._socket.recv(MAX_BYTES).decode().split()
            except (TimeoutError, OSError):
                continue
            except ValueError:
                continue  # a datagram of another program
            if token != self._token or int(rank) not in self._last_heartbeat_s:
                continue
            if word == "left":
                del self._last_heartbeat_s[int(rank)]
            else:
                self._last_heartbeat_s[int(rank)] = monotonic()
                self._named.discard(int(rank))


def _addresses(hosts: list[str]) -> list[str]:
    """Return the IPv4 addresses at which other ranks may reach this rank."""
    if len(set(hosts)) == 1:
        return [LOOPBACK]
    found = [
        a.address for entries in psutil.net_if_addrs().values() for a in entries if a.family == socket.AF_INET
    ]
    return [address for address in found if not address.startswith("127.")]


def heartbeat_dir(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of heartbeat files; None: no agent monitors this rank."""
    stage = environ.get("HOROVOD_TRAIN_RUN")
    return Path(stage) if stage is not None else None
