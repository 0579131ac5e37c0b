"""Findings (ok, warn or fail, with a fix) about hosts, from the collected details."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from horovod_train.checks.consistency import CLOCK_HINT, clock_mismatch, fingerprint_mismatch
from horovod_train.checks.finding import Finding, Level
from horovod_train.checks.host_details import HostDetails
from horovod_train.checks.host_facts import HostFacts

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
