"""Additional facts about a host, for ``horovod-train doctor``. ``hosts.py`` derives findings from them."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from horovod_train.checks.host_facts import HostFacts, describe_host
from horovod_train.horovod.fingerprint import package_version
from horovod_train.horovod.installed import HOROVOD_VERSION, installed_plan
from horovod_train.horovod.patches import own_patches

COMMAND_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class EngineFacts:
    """Horovod installation of a host.

    Attributes:
        horovod: Installed version; empty: not installed.
        wanted: Required version.
        build: Key of the build; None: not built by ``horovod-train engine build``.
        nccl: Version of NCCL; empty: built without NCCL.
        patches_differ: Names of patches that differ from those of the installed horovod-train.
    """

    horovod: str
    wanted: str
    build: str | None
    nccl: str
    patches_differ: list[str]


@dataclass(frozen=True)
class Gpu:
    """A GPU, with values as printed by ``nvidia-smi``.

    Attributes:
        clock: Current SM clock, such as ``1980 MHz``.
        max_clock: Maximum SM clock.
        ecc_errors: Lifetime number of uncorrected memory errors; ``[N/A]``: not counted.
        mig: MIG mode: ``Enabled``, ``Disabled`` or ``[N/A]``.
    """

    index: str
    name: str
    driver_version: str
    uuid: str
    clock: str = ""
    max_clock: str = ""
    ecc_errors: str = ""
    mig: str = ""


GPU_QUERY = (
    "index,name,driver_version,uuid,clocks.sm,clocks.max.sm,ecc.errors.uncorrected.aggregate.total,"
    "mig.mode.current"
)
"""The fields of ``Gpu``, in the syntax of ``nvidia-smi --query-gpu``."""


@dataclass(frozen=True)
class HostDetails(HostFacts):
    """Facts about a host, and details that take longer to collect.

    Attributes:
        python_version: Version of Python.
        engine: Horovod installation.
        names: Address of each requested host name; empty: the name cannot be resolved.
        disks: Free space for each requested folder, in bytes.
        open_files: Limit of open files per process.
        locked_memory_bytes: Limit of locked memory per process, in bytes; -1: no limit.
        load: Load average of the last minute.
        gpus: GPUs.
        gpu_links: Distinct link types between GPUs: NV18, PIX, PHB, NODE, SYS, ...
        gpu_peers: Distinct states of peer-to-peer reads between GPUs: OK, NS, ...
        infiniband: Names of InfiniBand adapters.
        speeds_mbit_s: Speed of each network interface that is up; 0: unknown.
        busy_ports: Requested TCP ports that are in use.
    """

    python_version: str
    engine: EngineFacts
    names: dict[str, str]
    disks: dict[str, int]
    open_files: int
    locked_memory_bytes: int
    load: float
    gpus: list[Gpu]
    gpu_links: list[str]
    gpu_peers: list[str]
    infiniband: list[str]
    speeds_mbit_s: dict[str, int]
    busy_ports: list[int]


def examine_host(folders: Sequence[str], names: Sequence[str], ports: Sequence[int]) -> HostDetails:
    """Collect the facts about this host, with free space for folders, addresses of names and busy ports."""
    up = {name: stats for name, stats in psutil.net_if_stats().items() if stats.isup}
    return HostDetails(
        **vars(describe_host(names)),
        python_version=platform.python_version(),
        engine=_engine(),
        names={name: _address(name) for name in names},
        disks={folder: _free_bytes(folder) for folder in folders},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        load=os.getloadavg()[0],
        gpus=_gpus(),
        gpu_links=cells_of(_output("nvidia-smi", "topo", "-m")),
        gpu_peers=cells_of(_output("nvidia-smi", "topo", "-p2p", "r")),
        infiniband=sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        speeds_mbit_s={name: stats.speed for name, stats in up.items()},
        busy_ports=[port for port in ports if not _is_free(port)],
    )


def _engine() -> EngineFacts:
    plan = installed_plan() or {}
    return EngineFacts(
        horovod=package_version("horovod") or "",
        wanted=HOROVOD_VERSION,
        build=plan.get("key"),
        nccl=plan.get("nccl", ""),
        patches_differ=sorted({name for name, _ in own_patches().items() ^ plan.get("patches", {}).items()}),
    )


def _gpus() -> list[Gpu]:
    text = _output("nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader")
    found = [line.split(", ") for line in text.splitlines()]
    return [Gpu(*values) for values in found if len(values) == len(fields(Gpu))]


def cells_of(table: str) -> list[str]:
    r"""Return the distinct entries for pairs of GPUs in a table of ``nvidia-smi topo``.

    >>> cells_of("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-51\nGPU1\tNV18\t X \t0-51")
    ['NV18']
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", table)  # the header is underlined by escape sequences
    rows = [line.split("\t") for line in plain.splitlines()]
    heads = next((row for row in rows if "GPU0" in [cell.strip() for cell in row]), [])
    places = [place for place, cell in enumerate(heads) if re.fullmatch(r"\s*GPU\d+\s*", cell)]
    gpu_rows = [row for row in rows if re.fullmatch(r"\s*GPU\d+\s*", row[0])]
    found = {row[place].strip() for row in gpu_rows for place in places if place < len(row)}
    return sorted(found - {"X", ""})


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
