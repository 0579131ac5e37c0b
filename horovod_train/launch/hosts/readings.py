"""What the doctor wants to know of a host: plain readings, no judgement."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from horovod_train.horovod.build import HOROVOD_VERSION, installed_key, installed_plan, own_patches
from horovod_train.horovod.fingerprint import package_version

COMMAND_TIMEOUT_S = 10.0


def take_readings(folders: Sequence[str], names: Sequence[str], ports: Sequence[int]) -> dict[str, Any]:
    """Return what this host is like.

    Args:
        folders: Folders whose free space matters.
        names: Hosts whose names have to be known here.
        ports: TCP ports that are wanted.
    """
    plan = installed_plan()
    return {
        "hostname": socket.gethostname(),
        "python": {"version": platform.python_version(), "path": sys.executable},
        "engine": {
            "horovod": package_version("horovod") or "",
            "wanted": HOROVOD_VERSION,
            "build": installed_key(),
            "nccl": (plan or {}).get("nccl", ""),
            "patches_differ": sorted(
                {name for name, _ in own_patches().items() ^ (plan or {}).get("patches", {}).items()}
            ),
        },
        "mpi": _mpi_version(),
        "names": {name: _address(name) for name in names},
        "time_s": time.time(),
        "disks": {folder: _free_bytes(folder) for folder in folders},
        "shared_memory_bytes": _free_bytes("/dev/shm"),  # noqa: S108
        "limits": {
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        },
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "memory_bytes": psutil.virtual_memory().available,
        "gpus": _gpus(),
        "infiniband": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "interfaces": {
            name: {"speed_mbit_s": stats.speed, "mtu": stats.mtu}
            for name, stats in psutil.net_if_stats().items()
            if stats.isup
        },
        "busy_ports": [port for port in ports if not _is_free(port)],
    }


def _mpi_version() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    found = re.search(
        r"\(Open MPI\) (\S+)", _output(str(beside if beside.exists() else "mpirun"), "--version")
    )
    return found[1] if found else ""


def _gpus() -> list[dict[str, str]]:
    fields = ("index", "name", "driver_version", "uuid")
    text = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    return [dict(zip(fields, line.split(", "), strict=False)) for line in text.splitlines() if ", " in line]


def _output(*command: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        ).stdout
    return ""


def _address(name: str) -> str:
    with suppress(OSError):
        return socket.gethostbyname(name)
    return ""


def _free_bytes(folder: str) -> int:
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    with suppress(OSError):
        return shutil.disk_usage(path).free
    return 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
