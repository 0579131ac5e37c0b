"""Facts about a host that a launch requires."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from horovod_train.system.machine import usable_cores

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host.

    Attributes:
        python: Path of the Python interpreter.
        prefix: Prefix of its environment.
        has_mpi: Whether Open MPI is installed in that environment, and so requires OPAL_PREFIX.
        path: PATH of a command started over ssh.
        cores: Number of cores that may be used.
        reads_memory: Whether a process may read the memory of another process.
        addresses: IPv4 addresses of each interface that is up.
        ssh_address: Local address of the ssh connection; empty: not connected by ssh.
        ways: Source address of packets to each requested host to which a route exists.
        time_s: Time of the clock, in seconds since 1970.
        shared_memory_bytes: Free space in /dev/shm, in bytes; None: /dev/shm does not exist.
    """

    python: str
    prefix: str
    has_mpi: bool
    path: str
    cores: int
    reads_memory: bool
    addresses: dict[str, list[str]]
    ssh_address: str
    ways: dict[str, str]
    time_s: float
    shared_memory_bytes: int | None


def describe_host(others: Sequence[str]) -> HostFacts:
    """Collect the facts about this host, including the source addresses of packets to other hosts."""
    return HostFacts(
        python=sys.executable,
        prefix=sys.prefix,
        has_mpi=(Path(sys.prefix) / "bin" / "orted").exists(),
        path=os.environ.get("PATH", os.defpath),
        cores=usable_cores(),
        reads_memory=can_read_memory(),
        addresses=addresses_by_interface(),
        # The format is "client-address client-port server-address server-port".
        ssh_address=(os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2],
        ways={name: way for name in others if (way := source_towards(name))},
        time_s=time.time(),
        shared_memory_bytes=_free_bytes(SHARED_MEMORY),
    )


def _free_bytes(folder: Path) -> int | None:
    """Return the free space of a folder in bytes, or None if the folder does not exist."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def can_read_memory() -> bool:
    """Return whether ``process_vm_readv`` is permitted. Containers forbid it by default."""
    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    pieces = [_Piece(ctypes.cast(buffer, ctypes.c_void_p), 1) for buffer in (target, source)]
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        count = libc.process_vm_readv(os.getpid(), ctypes.byref(pieces[0]), 1, ctypes.byref(pieces[1]), 1, 0)
    except AttributeError:
        return False
    return int(count) == 1


def source_towards(host: str) -> str:
    """Return the source address of packets from this machine to a host; empty: no route."""
    try:
        # Connecting a datagram socket sends nothing; it only determines the route.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            source: str = probe.getsockname()[0]
            return source
    except OSError:
        return ""


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each interface that is up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: [found.address for found in addresses if found.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }
