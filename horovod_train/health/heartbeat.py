"""Heartbeats of a rank, independent of MPI and Gloo. A frozen rank sends no heartbeats.

If a process is stopped, swaps, or is blocked in a network file system, its Horovod background thread is
blocked, too, and so is Horovod's stall inspector. Therefore, each rank has a thread:

* If ``horovod-train run`` started the rank, the thread writes the time to a file, which the agent on the host
  reads (``launch/hosts/agent.py``).
* Otherwise, the thread sends UDP datagrams to two other ranks, and monitors the two predecessors in the ring
  of ranks. If one of them sends none for ``health.stall_shutdown_s`` while this rank waits in a collective,
  this rank exits with an error, which ends the job. With Gloo, it first kills a frozen rank on the same host,
  because horovodrun waits five seconds for each remaining rank to exit, and ten seconds for a frozen rank.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep

import psutil

from horovod_train.collectives.base import Communicator, allgather_json, broadcast_json
from horovod_train.config.schema import Health
from horovod_train.errors import HorovodTrainError, LostError
from horovod_train.system.pids import kill, own_identity

INTERVAL_S = 0.5
NUM_WATCHED = 2
MAX_BYTES = 64
LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104  (the address by which other hosts reach this one is unknown)


def start_heartbeat(folder: Path, rank: int) -> None:
    """Start a thread that writes the time to a heartbeat file until the process exits.

    The agent deletes the file when the process has ended: a rank may also freeze while it exits.

    Args:
        folder: The stage folder of the run on this host (``heartbeat_dir``).
        rank: This rank.
    """
    path = folder / heartbeat_file(rank, os.getpid())

    def beat() -> None:
        # If the folder is missing or the disk is full, this rank is not monitored, but training continues.
        with suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                # Time since boot: equal in all processes of the host, and unaffected by clock changes.
                os.pwrite(file.fileno(), f"{monotonic():020.3f}\n".encode(), 0)
                sleep(INTERVAL_S)

    Thread(target=beat, daemon=True).start()


def heartbeat_file(rank: int, pid: int) -> str:
    """Return the name of a rank's heartbeat file.

    >>> heartbeat_file(3, 4711)
    'alive-3-4711'
    """
    return f"alive-{rank}-{pid}"


class PeerWatch:
    """Watchdog that monitors the heartbeats of peer ranks, for jobs without agents.

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
        self._warning_s = max(health.stall_warning_s, 4 * INTERVAL_S)
        self._shutdown_s = max(health.stall_shutdown_s, 8 * INTERVAL_S)
        self._world = world
        self._warn = warn
        self._end = end
        self._over = Event()
        hosts = allgather_json(world, world.host)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.settimeout(INTERVAL_S / 2)
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
            if now_s - looked_s > 4 * INTERVAL_S:
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
        until_s = monotonic() + INTERVAL_S
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
