"""Examination of hosts, and of the network between them with a benchmark of all-reduces."""

from __future__ import annotations

import time
from dataclasses import replace

from horovod_train.checks.finding import Finding
from horovod_train.checks.hosts import clock, examine
from horovod_train.doctor.network import AllreduceBenchmark, History, judge
from horovod_train.errors import HorovodTrainError, LaunchError, LostError
from horovod_train.events.types import AllreduceTime, PairTime
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.agent import HostActions
from horovod_train.launch.hosts.host_group import HostConnection, HostGroup, reach_all
from horovod_train.launch.hosts.hostlist import as_argument
from horovod_train.launch.jobs import StateFile
from horovod_train.launch.launchers.supervised import SupervisedLauncher
from horovod_train.launch.submit import launcher_named, make_plan
from horovod_train.launch.supervise.attempt import run_attempt
from horovod_train.launch.supervise.follow import RecordEvents
from horovod_train.launch.supervise.preflight import check_reach, choose_interfaces, describe

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
