"""Findings about hosts, from the collected details.

    HostFacts, describe_host               facts about a host that a launch requires
    HostDetails, examine_host              further facts, for ``horovod-train doctor``
    fingerprint_mismatch, clock_mismatch   comparison of environments and clocks between hosts, or between
                                           ranks
    examine                                the findings about hosts and their ranks
    Finding, report                        a finding, and findings as text

A finding is ok, warn or fail. It has a fix, unless it is ok.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import psutil

from horovod_train.horovod.build import own_patches
from horovod_train.horovod.fingerprint import package_version
from horovod_train.horovod.mpi import HOROVOD_VERSION, installed_mpi, installed_plan
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
        disks={folder: _free_bytes_for(folder) for folder in folders},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        load=os.getloadavg()[0],
        gpus=_gpu_details(),
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


def _gpu_details() -> list[Gpu]:
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


def _free_bytes_for(folder: str) -> int:
    """Return the free space for a folder that may not exist yet, in bytes."""
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    return _free_bytes(path) or 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


CLOCK_HINT = "synchronize the clocks (chrony, systemd-timesyncd), or raise health.max_clock_offset_s"


@dataclass(frozen=True)
class Mismatch:
    """Difference between hosts or ranks.

    Attributes:
        lines: For each property that differs, its values and the hosts or ranks with each value.
        outliers: Hosts or ranks with another value than the most frequent one; for clocks, the one furthest
            from the median.
        is_known: Whether the outliers deviate from a majority; otherwise any side may be the wrong one.
    """

    lines: tuple[str, ...]
    outliers: tuple[str, ...]
    is_known: bool = True


def fingerprint_mismatch(
    fingerprints: Mapping[str, Mapping[str, str]], named: Callable[[Sequence[str]], str] = ", ".join
) -> Mismatch | None:
    """Return the differences between fingerprints of hosts or ranks, or None; ``named`` formats their names.

    >>> fingerprint_mismatch({"a": {"torch": "2"}, "b": {"torch": "3"}, "c": {"torch": "2"}})
    Mismatch(lines=('torch: 2 on a, c; 3 on b',), outliers=('b',), is_known=True)
    """
    lines: list[str] = []
    outliers: set[str] = set()
    is_known = True
    for what in dict.fromkeys(what for each in fingerprints.values() for what in each):
        holders: dict[str, list[str]] = {}
        for who, each in fingerprints.items():
            holders.setdefault(each.get(what, "missing"), []).append(who)
        if len(holders) == 1:
            continue
        usual = max(holders.values(), key=len)
        is_known = is_known and 2 * len(usual) > len(fingerprints)
        outliers.update(who for some in holders.values() if some is not usual for who in some)
        lines.append(f"{what}: " + "; ".join(f"{value} on {named(who)}" for value, who in holders.items()))
    return Mismatch(tuple(lines), tuple(sorted(outliers)), is_known) if lines else None


def clock_mismatch(
    times_s: Mapping[str, float],
    max_offset_s: float,
    apart_s: float = 0.0,
    named: Callable[[str], str] = str,
) -> Mismatch | None:
    """Return a mismatch if two clocks differ by more than the limit, or None.

    Args:
        times_s: Time of each clock at the same moment, by name of the host or rank, in seconds.
        max_offset_s: Maximum difference between two clocks, in seconds.
        apart_s: Maximum time between the moments at which the clocks were read, in seconds.
        named: Formats a name for a message.

    >>> clock_mismatch({"a": 10.0, "b": 3.0, "c": 10.5}, 5.0).lines
    ('the clock of c is 7.5 s ahead of that of b; 5 s are allowed',)
    """
    latest = max(times_s, key=lambda who: times_s[who])
    earliest = min(times_s, key=lambda who: times_s[who])
    offset_s = times_s[latest] - times_s[earliest]
    if offset_s <= max_offset_s + apart_s:
        return None
    usual_s = statistics.median(times_s.values())
    outliers = max((latest, earliest), key=lambda who: abs(times_s[who] - usual_s))
    line = (
        f"the clock of {named(latest)} is {offset_s:.1f} s ahead of that of {named(earliest)}; "
        f"{max_offset_s:g} s are allowed"
    )
    return Mismatch((line,), (outliers,), is_known=len(times_s) > 2)


GIB = 1024**3
MIN_DISK_BYTES = 5 * GIB
MIN_SHARED_MEMORY_BYTES = GIB // 4
SHARED_BYTES_PER_RANK = 5 * 2**20
"""Open MPI allocates 4 MiB of shared memory per rank, and fails if this space is not free."""
FAR_LINKS = {"PHB", "NODE", "SYS"}
"""Links between GPUs that cross a CPU or the link between CPUs, as named by `nvidia-smi topo`."""

MIN_OPEN_FILES = 4096

SAME_STATE = "install the same version on all hosts"
FIXES_OF_DIFFERENCES = {
    "python": SAME_STATE,
    "engine": f"{SAME_STATE}; where GPUs are of several models, set HOROVOD_BUILD_CUDA_CC_LIST for all of "
    "them (80,90, say) when the engine is built",
    "mpi": SAME_STATE,
    "gpu": "kernels may round differently: weights may differ in the last bits",
}


def examine(
    hosts: Mapping[str, HostDetails], ranks: Mapping[str, int], device: str, *, share_gpus: bool = False
) -> Iterator[Finding]:
    """Yield the findings for each host and its ranks, and those for differences between hosts."""
    for host, readings in hosts.items():
        yield from _software(host, readings)
        yield from _names(host, readings)
        yield from _resources(host, readings, ranks[host])
        yield from _gpus(host, readings, ranks[host], device, share_gpus=share_gpus)
        yield from _ports(host, readings)
    yield from _differences(hosts)


def _software(host: str, readings: HostDetails) -> Iterator[Finding]:
    yield Finding(host, "python", f"{readings.python_version} ({readings.python})")
    engine = readings.engine
    if engine.horovod != engine.wanted or engine.build is None:
        found = f"Horovod {engine.horovod or 'missing'}, not built by horovod-train"
        yield Finding(host, "engine", found, "fail", "run `horovod-train engine build` there")
    elif engine.patches_differ:
        found = f"built by another version of horovod-train: {', '.join(engine.patches_differ)} differ"
        yield Finding(host, "engine", found, "warn", "run `horovod-train engine build` there")
    else:
        yield Finding(host, "engine", f"Horovod {engine.horovod}, build {engine.build[:12]}")
    mpi = readings.mpi
    if mpi:
        yield Finding(host, "mpi", f"{mpi} ({readings.mpi_programs})")
    else:
        fix = "run `horovod-train engine build` there, or use launch.controller: gloo"
        yield Finding(host, "mpi", "unknown: the engine has no record of its MPI library", "warn", fix)


def _names(host: str, readings: HostDetails) -> Iterator[Finding]:
    unknown = sorted(name for name, address in readings.names.items() if not address)
    if unknown:
        fix = "add them to DNS, or to /etc/hosts on this host"
        yield Finding(host, "names", f"cannot resolve {', '.join(unknown)}", "fail", fix)
    elif readings.names:
        yield Finding(host, "names", f"resolves {len(readings.names)} other host(s)")
    loopback = sorted(name for name, address in readings.names.items() if address.startswith("127."))
    if loopback:
        fix = "remove the line with this address from /etc/hosts"
        yield Finding(host, "names", f"resolves {', '.join(loopback)} to a loopback address", "fail", fix)


def _resources(host: str, readings: HostDetails, ranks: int) -> Iterator[Finding]:
    for folder, free in readings.disks.items():
        level: Level = "ok" if free >= MIN_DISK_BYTES else "warn"
        fix = "make room, or set run_dir to another disk"
        yield Finding(host, "disk", f"{free / GIB:.1f} GiB free for {folder}", level, fix)
    yield shared_memory(host, readings, ranks)
    files = readings.open_files
    level = "ok" if files >= MIN_OPEN_FILES else "warn"
    yield Finding(host, "open files", str(files), level, f"ulimit -n {16 * MIN_OPEN_FILES} (limits.conf)")
    if readings.infiniband:
        is_free = readings.locked_memory_bytes == -1
        found = "unlimited" if is_free else f"{readings.locked_memory_bytes} bytes"
        fix = "ulimit -l unlimited (limits.conf): RDMA locks its buffers"
        yield Finding(host, "locked memory", found, "ok" if is_free else "fail", fix)
    cores, load = readings.cores, readings.load
    if ranks > cores:
        fix = f"start at most {cores} ranks on this host"
        yield Finding(host, "cores", f"{cores} for {ranks} ranks", "warn", fix)
    elif load > cores:
        yield Finding(
            host, "cores", f"{cores}, load {load:.1f}: other processes use the CPU", "warn", "see top"
        )
    else:
        yield Finding(host, "cores", f"{cores} for {ranks} rank(s), load {load:.1f}")


def shared_memory(host: str, facts: HostFacts, ranks: int) -> Finding:
    """Return the finding about shared memory. If it is too small, launchers report that MPI is missing."""
    free_bytes, needed_bytes = facts.shared_memory_bytes, ranks * SHARED_BYTES_PER_RANK
    fix = (
        "delete stale files (`ls -l /dev/shm`), or enlarge it: mount -o remount,size=2G /dev/shm "
        "(docker --shm-size, launch.kubernetes.shm_size)"
    )
    if free_bytes is None:
        return Finding(host, "shared memory", "there is no /dev/shm", "warn", fix)
    if ranks > 1 and free_bytes < needed_bytes:
        found = (
            f"there is room for {free_bytes / 2**20:.1f} MiB in /dev/shm, and {ranks} ranks need "
            f"{needed_bytes / 2**20:.0f} MiB there to communicate"
        )
        return Finding(host, "shared memory", found, "fail", fix)
    level: Level = "ok" if free_bytes >= MIN_SHARED_MEMORY_BYTES else "warn"
    return Finding(host, "shared memory", f"{free_bytes / GIB:.1f} GiB in /dev/shm", level, fix)


def _gpus(
    host: str, readings: HostDetails, ranks: int, device: str, *, share_gpus: bool
) -> Iterator[Finding]:
    gpus, nccl = readings.gpus, readings.engine.nccl
    if not gpus:
        level: Level = "fail" if device == "cuda" else "ok"
        yield Finding(host, "gpu", "none", level, "install the driver, or set train.device: cpu")
        return
    found = f"{len(gpus)} x {gpus[0].name}, driver {gpus[0].driver_version}"
    if device != "cpu" and ranks > len(gpus):
        if share_gpus:
            yield Finding(host, "gpu", f"{found}, shared by {ranks} ranks")
        else:
            fix = f"start {len(gpus)} on this host at most, or set launch.share_gpus: true (slow)"
            yield Finding(host, "gpu", f"{found}: too few for {ranks} ranks", "fail", fix)
    else:
        yield Finding(host, "gpu", found)
    yield from _gpu_state(host, readings)
    if not nccl:
        fix = "run `horovod-train engine check` there: it says what is missing"
        yield Finding(host, "nccl", "not in this Horovod build: all-reduces run on the host", "warn", fix)
    else:
        yield Finding(host, "nccl", nccl)


def _gpu_state(host: str, readings: HostDetails) -> Iterator[Finding]:
    """Yield findings about memory errors, clocks and links of the GPUs of a host."""
    for gpu in readings.gpus:
        if gpu.ecc_errors.isdigit() and int(gpu.ecc_errors):
            found = f"GPU {gpu.index} has had {gpu.ecc_errors} memory errors that were not corrected"
            yield Finding(
                host, "gpu ecc", found, "warn", "see `nvidia-smi -q -d ECC,ROW_REMAPPER`; reset or replace it"
            )
    clocks = {f"{gpu.clock} of {gpu.max_clock}" for gpu in readings.gpus if gpu.max_clock}
    if clocks:
        yield Finding(host, "gpu clocks", ", ".join(sorted(clocks)))
    if len(readings.gpus) == 1:
        return
    if readings.gpu_links:
        through_cpu = sorted(FAR_LINKS & set(readings.gpu_links))
        fix = "ranks of this host exchange through the CPU: NVLink or one PCIe switch is faster"
        yield Finding(host, "gpu links", ", ".join(readings.gpu_links), "warn" if through_cpu else "ok", fix)
    if set(readings.gpu_peers) - {"OK"}:
        found = ", ".join(readings.gpu_peers)
        fix = "no peer access between GPUs (a virtual machine, or the IOMMU): NCCL uses a slower transport"
        yield Finding(host, "gpu peers", found, "warn", fix)


def _ports(host: str, readings: HostDetails) -> Iterator[Finding]:
    if readings.busy_ports:
        found = f"in use: {', '.join(map(str, readings.busy_ports))}"
        yield Finding(host, "ports", found, "warn", "ranks use the port + 100 instead; or set metrics.port")
    else:
        yield Finding(host, "ports", "metrics ports are free")


def _differences(hosts: Mapping[str, HostDetails]) -> Iterator[Finding]:
    """Yield a finding for each property that differs between hosts."""
    if len(hosts) == 1:
        return
    for what in ("python", "engine", "mpi", "gpu"):
        values = {host: _fingerprint(readings)[what] for host, readings in hosts.items()}
        found = fingerprint_mismatch({host: {what: value or "none"} for host, value in values.items()})
        if found is not None:
            level: Level = "warn" if what == "gpu" and all(values.values()) else "fail"
            yield Finding(
                "", what, f"differs: {found.lines[0].partition(': ')[2]}", level, FIXES_OF_DIFFERENCES[what]
            )


def _fingerprint(readings: HostDetails) -> dict[str, str]:
    gpus = {f"{gpu.name} {gpu.driver_version}" for gpu in readings.gpus}
    return {
        "python": readings.python_version,
        "engine": str(readings.engine.build)[:12],
        "mpi": readings.mpi,
        "gpu": ", ".join(sorted(gpus)),
    }


def clock(offsets_s: Mapping[str, float], max_offset_s: float) -> Iterator[Finding]:
    """Yield a finding about the clock offset of each host relative to this machine."""
    mismatch = clock_mismatch(offsets_s, max_offset_s) if offsets_s else None
    outliers: Collection[str] = ()
    if mismatch is not None:  # with two clocks, the wrong one cannot be determined
        outliers = mismatch.outliers if mismatch.is_known else offsets_s.keys()
    for host, offset_s in offsets_s.items():
        level: Level = "fail" if abs(offset_s) > max_offset_s or host in outliers else "ok"
        yield Finding(host, "clock", f"{offset_s:+.3f} s relative to this machine", level, CLOCK_HINT)


Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        host: The checked host; empty: all hosts, or this machine.
        what: Subject of the check.
        found: Result of the check.
        level: ok, warn, or fail. With fail, jobs cannot run.
        fix: Recommended action; printed unless the level is ok.
    """

    host: str
    what: str
    found: str
    level: Level = "ok"
    fix: str = ""

    def __str__(self) -> str:
        return self.line()

    def line(self, *, with_host: bool = True) -> str:
        """Return the finding as text, with its fix on a second line."""
        fix = f"\n       fix: {self.fix}" if self.fix and self.level != "ok" else ""
        host = f"{self.host or 'all':<16} " if with_host else ""
        return f"{self.level:<4} {host}{self.what:<14} {self.found}{fix}"

    def as_json(self) -> dict[str, str]:
        """Return the finding as a JSON object."""
        return asdict(self)


def prevents_jobs(findings: Sequence[Finding]) -> bool:
    """Return whether any finding prevents jobs from running."""
    return any(finding.level == "fail" for finding in findings)


def report(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings as text, then a summary."""
    yield from map(str, findings)
    failed = sum(finding.level == "fail" for finding in findings)
    num_warnings = sum(finding.level == "warn" for finding in findings)
    yield f"{len(findings)} findings: {failed} prevent jobs from running, {num_warnings} are warnings"
