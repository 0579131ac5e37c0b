"""Preparation before ranks start: comparison of hosts, check of connectivity, and files on each host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from horovod_train.checks.hosts import (
    CLOCK_HINT,
    HostFacts,
    clock_mismatch,
    fingerprint_mismatch,
    shared_memory,
)
from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, LostError
from horovod_train.horovod.fingerprint import environment_fingerprint
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.agent import HostActions
from horovod_train.launch.hosts.host_group import HostConnection, HostGroup, transport_variables
from horovod_train.launch.hosts.hostlist import Chosen, choose
from horovod_train.launch.hosts.staging import fingerprint_script, folders_of, misfit, pack_code, stage_files
from horovod_train.launch.mpi import mpi_of

ANSWERS_APART_S = 5.0
# Variables of this environment with these prefixes are passed to ranks on other hosts.
FORWARDED = (
    *("CUDA_LAUNCH", "HF_", "HOROVOD_", "JAX_", "KERAS_", "KMP_", "MKL_", "NCCL_", "OMP_", "TF_", "TORCH"),
    *("UCX_", "XLA_"),
)


def prepare(
    hosts: HostGroup,
    request: LaunchRequest,
    environ: Mapping[str, str],
    secrets: Mapping[str, str],
    console: JobConsole,
) -> None:
    """Compare the hosts, check that they reach each other, and write the files of the run to each.

    Raises:
        LaunchError: The hosts differ, or do not reach each other; names the hosts, with a hint.
    """
    job = request.job
    descriptions = describe(hosts)
    check_shared_memory(hosts, descriptions)
    chosen: dict[str, Chosen] = {}
    if request.is_remote or job.launch.container is not None:
        check_software(hosts, request)
    if request.is_remote:
        chosen = choose_interfaces(hosts, job, descriptions)
        check_clocks(descriptions, job.health.max_clock_offset_s)
        check_reach(hosts, chosen)
        for name, interface in chosen.items():
            console.print(
                f"{name}: network interface {interface.name} ({interface.address}): {interface.reason}"
            )
    # Ranks of an elastic job receive a job with the current number of ranks.
    wanted = {"HOROVOD_TRAIN_RANKS_WANTED": str(request.num_wanted)} if request.num_wanted else {}
    archive = ""
    if job.launch.ship_code:
        job, archive = _with_shipped_code(job, request.stage)

    def put(connection: HostConnection) -> dict[str, object]:
        found = descriptions[connection.host.name]
        variables = rank_variables(job, connection, found, chosen.get(connection.host.name), environ)
        return {
            "files": stage_files(
                job,
                request.run_id,
                request.stage,
                python=found.python,
                mpi_programs=found.mpi_programs or f"{found.prefix}/bin",
                folder=request.folder,
                program=request.program,
                variables={**variables, **wanted, **secrets},
            ),
            "archive": archive,
        }

    hosts.each(HostActions.put, put)


def check_software(hosts: HostGroup, request: LaunchRequest) -> None:
    """Compare the software of ranks between hosts, and that of a container with this machine's.

    Raises:
        LaunchError: It differs, or a container cannot be used.
    """
    job, container = request.job, request.job.launch.container
    # Shipped code is identical on all hosts.
    task = job.task if ":" in job.task and not job.launch.ship_code else None
    script = ""
    if container is not None:
        script = fingerprint_script(container, folders_of(job, request.folder), task)
    fingerprints = hosts.each(HostActions.fingerprint, lambda _: {"task": task, "script": script})
    check_fingerprints(fingerprints)
    if container is None:
        return
    inside, own = next(iter(fingerprints.values())), environment_fingerprint()
    uses_mpi = job.launch.controller == "mpi" and request.num_ranks > 1
    reasons = [misfit(mpi_of(request) if uses_mpi else None, inside["MPI library"])]
    if inside["horovod_train code"] != own["horovod_train code"]:
        reasons.append("horovod_train in the image is another version than on this machine")
    if any(reasons):
        raise LaunchError(
            f"{container.image}: {'; '.join(filter(None, reasons))}",
            hint="build the image with this version of horovod_train and the MPI library of the hosts",
        )


def describe(hosts: HostGroup) -> dict[str, HostFacts]:
    """Return facts about each host, by its name."""
    names = [connection.host.name for connection in hosts.connections]

    def others(connection: HostConnection) -> dict[str, object]:
        return {"others": [name for name in names if name != connection.host.name][:2]}

    return hosts.each(HostActions.describe, others)


def check_shared_memory(hosts: HostGroup, descriptions: Mapping[str, HostFacts]) -> None:
    """Raise ``LostError`` for a host that has too little free shared memory for its ranks."""
    for connection in hosts.connections:
        name = connection.host.name
        finding = shared_memory(name, descriptions[name], connection.host.num_ranks)
        if finding.level == "fail":
            raise LostError(f"{name}: {finding.found}", hint=finding.fix, hosts=[name])


def choose_interfaces(hosts: HostGroup, job: Job, descriptions: Mapping[str, HostFacts]) -> dict[str, Chosen]:
    """Return the network interface of each host.

    Raises:
        LaunchError: A host has no suitable interface.
    """
    reached = [found.ssh_address for found in descriptions.values() if found.ssh_address]
    return {
        connection.host.name: choose(
            connection.host, job.launch.network_interface, descriptions[connection.host.name], reached
        )
        for connection in hosts.connections
    }


def check_fingerprints(fingerprints: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ``LostError`` if environments differ: ranks would crash, hang, or compute other results."""
    found = fingerprint_mismatch(fingerprints)
    if found is not None:
        who = f"on {', '.join(found.outliers)} as on the other hosts" if found.is_known else "on all hosts"
        raise LostError(
            "the hosts do not have the same:\n" + "\n".join(f"  {line}" for line in found.lines),
            hint=f"install {who}: the same packages, engine (`horovod-train engine build`) and code (or set "
            "launch.ship_code: true)",
            hosts=found.outliers,
        )


def check_clocks(descriptions: Mapping[str, HostFacts], max_offset_s: float) -> None:
    """Raise ``LostError`` for a host with a wrong clock, before its ranks detect it.

    The facts are requested in parallel; responses may be ``ANSWERS_APART_S`` apart, which is tolerated.
    """
    times_s = {name: found.time_s for name, found in descriptions.items()}
    found = clock_mismatch(times_s, max_offset_s, ANSWERS_APART_S)
    if found is not None:
        raise LostError(found.lines[0], hint=CLOCK_HINT, hosts=found.outliers)


def check_reach(hosts: HostGroup, chosen: Mapping[str, Chosen]) -> None:
    """Raise ``LostError`` if a host does not reach the next host in the list, or the first one.

    Rings connect each host to the next one; the rendezvous is on the first one.
    """
    names = [connection.host.name for connection in hosts.connections]
    ports = hosts.each(
        HostActions.listen, lambda m: {"address": chosen[m.host.name].address, "name": m.host.name}
    )

    def targets(connection: HostConnection) -> dict[str, object]:
        own = names.index(connection.host.name)
        others = dict.fromkeys([names[(own + 1) % len(names)], names[0]])
        others.pop(connection.host.name, None)
        return {
            "source": chosen[connection.host.name].address,
            "targets": [(name, chosen[name].address, ports[name]) for name in others],
        }

    failures = hosts.each(HostActions.reach, targets)
    lines = [
        f"{source} ({chosen[source].name}, {chosen[source].address}) does not reach "
        f"{target} ({chosen[target].name}, {chosen[target].address}): {why}"
        for source, failed in failures.items()
        for target, why in failed.items()
    ]
    if lines:
        met = Counter(name for source, failed in failures.items() for name in (source, *failed))
        raise LostError(
            "\n  ".join(lines),
            hint="name an interface that the hosts share (launch.network_interface), or open the firewall "
            "between them for all TCP ports",
            # The host in most of the failed connections; of several, the last one.
            hosts=[max(met, key=lambda name: (met[name], names.index(name)))],
        )


def rank_variables(
    job: Job,
    connection: HostConnection,
    description: HostFacts,
    interface: Chosen | None,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment variables of ranks on one host, in addition to those of launchers.

    Ranks of a host divide its cores: with one thread per core in each rank, threads would compete.
    """
    host = connection.host
    threads = job.launch.threads_per_rank or max(1, description.cores // host.num_ranks)
    variables = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if not host.is_local:
        variables |= {name: value for name, value in environ.items() if name.startswith(FORWARDED)}
    if job.launch.container is None:
        if not host.is_local:
            variables["PATH"] = description.path
        variables |= description.mpi_environment
    variables |= transport_variables(description, interface)
    if not host.is_local:
        # The name by which the host was reached; its own name may be unknown to other hosts.
        variables["HOROVOD_TRAIN_HOST"] = host.name
    return {**variables, **job.launch.env, **host.settings.env}


def _with_shipped_code(job: Job, stage: str) -> tuple[Job, str]:
    file, _, attribute = job.task.rpartition(":")
    if not file.endswith(".py"):
        raise LaunchError(
            f"launch.ship_code: the task {job.task} is not a file", hint="write task: folder/file.py:Class"
        )
    moved = f"{stage}/code/{Path(file).name}:{attribute}"
    return job.model_copy(update={"task": moved}), pack_code(Path(file).parent)
