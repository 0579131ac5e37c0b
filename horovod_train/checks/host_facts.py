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

from horovod_train.horovod.mpi import installed_mpi
from horovod_train.system.machine import usable_cores

FABRICS = ("infiniband", "hfi1", "cxi")
"""Classes of adapters in /sys/class: InfiniBand, Omni-Path, Slingshot."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host.

    Attributes:
        python: Path of the Python interpreter.
        prefix: Prefix of its environment.
        mpi: MPI library of the engine, such as "Open MPI 4.1.8"; empty: unknown.
        mpi_programs: Folder of its programs; empty: unknown.
        mpi_environment: Variables with which ranks use it.
        path: PATH of a command started over ssh, preceded by the programs of that environment.
        cores: Number of cores that may be used.
        has_fabric: Whether the host has an InfiniBand, Omni-Path or Slingshot adapter.
        reads_memory: Whether a process may read the memory of another process.
        addresses: IPv4 addresses of each interface that is up.
        ssh_address: Local address of the ssh connection; empty: not connected by ssh.
        ways: Source address of packets to each requested host to which a route exists.
        time_s: Time of the clock, in seconds since 1970.
        shared_memory_bytes: Free space in /dev/shm, in bytes; None: /dev/shm does not exist.
    """

    python: str
    prefix: str
    mpi: str
    mpi_programs: str
    mpi_environment: dict[str, str]
    path: str
    cores: int
    has_fabric: bool
    reads_memory: bool
    addresses: dict[str, list[str]]
    ssh_address: str
    ways: dict[str, str]
    time_s: float
    shared_memory_bytes: int | None


def describe_host(others: Sequence[str]) -> HostFacts:
    """Collect the facts about this host, including the source addresses of packets to other hosts."""
    mpi = installed_mpi()
    path = f"{sys.prefix}/bin:{os.environ.get('PATH', os.defpath)}"
    return HostFacts(
        python=sys.executable,
        prefix=sys.prefix,
        mpi=str(mpi or ""),
        mpi_programs=str(mpi.programs) if mpi else "",
        mpi_environment=mpi.environment({**os.environ, "PATH": path}) if mpi else {},
        path=path,
        cores=usable_cores(),
        has_fabric=any(entry for name in FABRICS for entry in Path("/sys/class", name).glob("*")),
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
