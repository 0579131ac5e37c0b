"""Examination of hosts, and of the network between them with a benchmark of all-reduces.

    examine_hosts                findings about hosts
    examine_network, judge       the benchmark, and findings about the network from it
    AllreduceBenchmark, History  results of a benchmark, and of earlier ones

Earlier results are those with the same hosts, numbers of ranks and controller.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from horovod_train.checks.hosts import Finding, clock, examine
from horovod_train.errors import HorovodTrainError, LaunchError, LostError
from horovod_train.events.types import AllreduceTime, PairTime
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.agent import HostActions
from horovod_train.launch.hosts.host_group import HostConnection, HostGroup, reach_all
from horovod_train.launch.hosts.hostlist import as_argument
from horovod_train.launch.jobs import StateFile
from horovod_train.launch.launchers.hosts import SupervisedLauncher
from horovod_train.launch.submit import launcher_named, make_plan
from horovod_train.launch.supervise.attempt import run_attempt
from horovod_train.launch.supervise.follow import RecordEvents
from horovod_train.launch.supervise.preflight import check_reach, choose_interfaces, describe
from horovod_train.system.files import state_dir

SLOW_PAIR = 2.0
SLOWER_THAN_BEFORE = 0.7
SLOWER_THAN_LINK = 0.5
MAX_HISTORY = 100
LARGE_BYTES = 1 << 24


@dataclass
class AllreduceBenchmark:
    """Results of a benchmark.

    Attributes:
        times: Times of all-reduces, from small to large messages.
        pairs: Times of a message exchange between each pair of hosts.
    """

    times: list[AllreduceTime] = field(default_factory=list)
    pairs: list[PairTime] = field(default_factory=list)

    def best(self, via: str) -> float:
        """Return the highest bus bandwidth of large messages, in bytes per second; 0: not measured."""
        return max(
            (each.bytes_per_s for each in self.times if each.via == via and each.size_bytes >= LARGE_BYTES),
            default=0.0,
        )

    def latency_s(self, via: str) -> float:
        """Return the shortest time of a message, in seconds; 0: not measured."""
        return min((each.seconds for each in self.times if each.via == via), default=0.0)

    def table(self) -> Iterator[str]:
        """Yield the lines of a human-readable table."""
        vias = list(dict.fromkeys(each.via for each in self.times))
        by_size: dict[int, dict[str, AllreduceTime]] = {}
        for each in self.times:
            by_size.setdefault(each.size_bytes, {})[each.via] = each
        yield "all-reduce    " + "".join(f"{via:>26}" for via in vias)
        for size, found in by_size.items():
            cells = "".join(_cell(found.get(via)) for via in vias)
            yield f"{size_text(size):>10}    {cells}"


def _cell(found: AllreduceTime | None) -> str:
    if found is None:
        return " " * 26
    return f"{1e3 * found.seconds:>12.3f} ms {found.bytes_per_s / 1e9:>6.2f} GB/s"


def size_text(size_bytes: int) -> str:
    """Return a human-readable size.

    >>> size_text(1024), size_text(64 << 20)
    ('1 KiB', '64 MiB')
    """
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def judge(
    measured: AllreduceBenchmark, link_mbit_s: int, history: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Yield the findings from a benchmark of all-reduces.

    Args:
        measured: Results of the benchmark.
        link_mbit_s: Speed of the slowest network interface used; 0: unknown, or a single host.
        history: Earlier results of the same hosts, oldest first.
    """
    best = measured.best("horovod")
    latency = f"{1e3 * measured.latency_s('horovod'):.2f} ms for the smallest message"
    yield Finding("", "all-reduce", f"{best / 1e9:.2f} GB/s, {latency}")
    if link_mbit_s > 0:
        link = link_mbit_s * 1e6 / 8
        found = f"{100 * best / link:.0f} % of the bandwidth of the link ({link / 1e9:.2f} GB/s)"
        is_slow = best < SLOWER_THAN_LINK * link
        fix = "is the link shared? set another launch.network_interface, or measure with ethtool and iperf3"
        yield Finding("", "link", found, "warn" if is_slow else "ok", fix)
    reference = measured.best("mpi4py")
    if reference:
        yield Finding("", "reference", f"mpi4py alone reaches {reference / 1e9:.2f} GB/s")
    yield from _slow_pairs(measured.pairs)
    yield from compare(best, history)


def compare(best: float, history: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding that compares a bandwidth, in bytes per second, with earlier results, if any."""
    if history:
        before = statistics.median(entry["bytes_per_s"] for entry in history[-5:])
        when = time.strftime("%Y-%m-%d", time.localtime(history[-1]["unix_time_s"]))
        is_slower = best < SLOWER_THAN_BEFORE * before
        found = f"{100 * best / before:.0f} % of the earlier bandwidth (last measured on {when})"
        fix = "check cables and switches, and for other jobs on the network"
        yield Finding("", "history", found, "warn" if is_slower else "ok", fix)


def _slow_pairs(pairs: Sequence[PairTime]) -> Iterator[Finding]:
    if len(pairs) < 2:
        return
    usual = statistics.median(pair.seconds for pair in pairs)
    slow = [pair for pair in pairs if pair.seconds > SLOW_PAIR * usual]
    for pair in slow:
        times = f"{1e3 * pair.seconds:.2f} ms for 1 MiB, others {1e3 * usual:.2f} ms"
        found = f"{' and '.join(pair.hosts)}: {times}"
        yield Finding(
            "", "slow pair", found, "warn", "look at the cable, the port and the switch between them"
        )
    if not slow:
        yield Finding("", "pairs", f"{len(pairs)} pairs of hosts are alike: {1e3 * usual:.2f} ms for 1 MiB")


class History:
    """File of results of earlier benchmarks with the same hosts, numbers of ranks and controller."""

    def __init__(self, hosts: Sequence[str], controller: str) -> None:
        name = hashlib.sha256("\n".join([controller, *sorted(hosts)]).encode()).hexdigest()[:16]
        self._path = state_dir() / "doctor" / f"{name}.jsonl"

    def read(self) -> list[dict[str, Any]]:
        """Return the latest ``MAX_HISTORY`` results, oldest first; empty if the file cannot be read."""
        found = []
        with suppress(OSError, UnicodeDecodeError):
            for line in self._path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # a line that was not written completely
                    found.append(json.loads(line))
        valid = [entry for entry in found if isinstance(entry, dict) and entry.get("bytes_per_s")]
        return valid[-MAX_HISTORY:]

    def add(self, measured: AllreduceBenchmark) -> None:
        """Append a result."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        entry = {
            "unix_time_s": time.time(),
            "bytes_per_s": measured.best("horovod"),
            "latency_s": measured.latency_s("horovod"),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


BENCHMARK = ("horovod_train.frameworks.torch.comm.allreduce_benchmark",)


def examine_hosts(request: LaunchRequest) -> tuple[list[Finding], int]:
    """Return findings about the hosts, and the speed of the slowest interface between them in Mbit/s."""
    launcher = _supervised(request)
    request.log_dir.mkdir(parents=True, exist_ok=True)
    make_plan(request).write_files()
    reached = reach_all(
        request.hosts,
        lambda host: launcher.shell(request, host),
        request.stage,
        request.job.launch.host_timeout_s,
    )
    findings = [
        Finding(host.name, "ssh", result.message, "fail", result.hint)
        if isinstance(result, LostError)
        else Finding(host.name, "ssh", "this machine" if host.is_local else "answers")
        for host, result in zip(request.hosts, reached, strict=True)
    ]
    hosts = HostGroup([result for result in reached if not isinstance(result, LostError)])
    try:
        if not hosts.connections:
            return findings, 0
        found, speed = _examine_all(hosts, request)
        return [*findings, *found], speed
    finally:
        hosts.close()


def _examine_all(hosts: HostGroup, request: LaunchRequest) -> tuple[list[Finding], int]:
    job = request.job
    names = [connection.host.name for connection in hosts.connections]
    ports = [job.metrics.port + number for number in range(max(h.num_ranks for h in request.hosts))]

    def arguments(connection: HostConnection) -> dict[str, object]:
        others = [name for name in names if name != connection.host.name]
        return {"folders": [request.job.run_dir], "names": others, "ports": ports}

    readings = hosts.each(HostActions.examine, arguments)
    ranks = {connection.host.name: connection.host.num_ranks for connection in hosts.connections}
    findings = list(examine(readings, ranks, job.train.device, share_gpus=job.launch.share_gpus))
    findings += clock(_offsets_s(hosts), request.job.health.max_clock_offset_s)
    if len(hosts.connections) == 1:
        return findings, 0
    try:
        chosen = choose_interfaces(hosts, request.job, describe(hosts))
        findings += [
            Finding(name, "interface", f"{interface.name} ({interface.address}), {interface.reason}")
            for name, interface in chosen.items()
        ]
        check_reach(hosts, chosen)
        findings.append(Finding("", "reach", f"{len(names)} hosts reach each other"))
    except LaunchError as error:
        return [*findings, Finding("", "reach", error.message, "fail", error.hint)], 0
    speeds = [readings[name].speeds_mbit_s.get(i.name, 0) for name, i in chosen.items()]
    return findings, min(speeds)


def _offsets_s(hosts: HostGroup) -> dict[str, float]:
    """Return each host's clock minus this machine's clock, in seconds; the error is half a round trip."""
    offsets = {}
    for connection in hosts.connections:
        before = time.time()
        remote_time_s = connection.call(HostActions.describe, others=[]).time_s
        offsets[connection.host.name] = remote_time_s - (before + time.time()) / 2
    return offsets


def examine_network(
    request: LaunchRequest, link_mbit_s: int, console: JobConsole
) -> tuple[list[Finding], AllreduceBenchmark]:
    """Benchmark all-reduces over the ranks of a request; return the findings and the results.

    ``link_mbit_s`` is the speed of the slowest network interface used, or 0 if unknown.
    """
    measuring = replace(request, run_id=f"{request.run_id}-sweep", program=BENCHMARK)
    measuring.log_dir.mkdir(parents=True, exist_ok=True)
    measured = RecordEvents()
    try:
        run_attempt(
            _supervised(request),
            measuring,
            make_plan(measuring),
            console,
            StateFile(measuring.log_dir),
            followers=[measured],
        )
    except HorovodTrainError as error:
        finding = Finding("", "all-reduce", error.message, "fail", error.hint or "see the findings above")
        return [finding], AllreduceBenchmark()
    found = AllreduceBenchmark(measured.of_kind(AllreduceTime), measured.of_kind(PairTime))
    history = History(as_argument(request.hosts).split(","), request.job.launch.controller)
    findings = list(judge(found, link_mbit_s, history.read()))
    history.add(found)
    return findings, found


def _supervised(request: LaunchRequest) -> SupervisedLauncher:
    launcher = launcher_named(request.job.launch.launcher)
    if not isinstance(launcher, SupervisedLauncher):
        raise LaunchError(
            f"the launcher {request.job.launch.launcher!r} does not start ranks from this process",
            hint="inside an allocation use --launcher slurm-allocation; for Kubernetes, --kubernetes",
        )
    return launcher
