"""Before ranks start: hosts are alike, reach each other, and have the run's files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from horovod_train.checks.consistency import CLOCK_HINT, clock_mismatch, fingerprint_mismatch
from horovod_train.checks.host_facts import HostFacts
from horovod_train.checks.hosts import shared_memory
from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, LostError
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.agent import HostActions
from horovod_train.launch.hosts.host_group import HostConnection, HostGroup
from horovod_train.launch.hosts.interfaces import Chosen, choose
from horovod_train.launch.hosts.staging import pack_code, stage_files

ANSWERS_APART_S = 5.0
# What a user exports for a job here, its ranks elsewhere are to see.
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
    """Compare the hosts, see that they reach each other, and lay out the run's files on each.

    Raises:
        LaunchError: They differ, or do not reach each other; it names hosts and what to do.
    """
    job = request.job
    descriptions = describe(hosts)
    check_shared_memory(hosts, descriptions)
    chosen: dict[str, Chosen] = {}
    if request.is_remote:
        # Code that is shipped is the same everywhere.
        task = job.task if ":" in job.task and not job.launch.ship_code else None
        check_fingerprints(hosts.each(HostActions.fingerprint, lambda _: {"task": task}))
        chosen = choose_interfaces(hosts, job, descriptions)
        check_clocks(descriptions, job.health.max_clock_offset_s)
        check_reach(hosts, chosen)
        for name, interface in chosen.items():
            console.print(
                f"{name}: network interface {interface.name} ({interface.address}): {interface.reason}"
            )
    # Ranks of an elastic job get a job with the current number of ranks.
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
                prefix=found.prefix,
                folder=request.folder,
                program=request.program,
                variables={**variables, **wanted, **secrets},
            ),
            "archive": archive,
        }

    hosts.each(HostActions.put, put)


def describe(hosts: HostGroup) -> dict[str, HostFacts]:
    """Return what each host is and has, by its name."""
    names = [connection.host.name for connection in hosts.connections]

    def others(connection: HostConnection) -> dict[str, object]:
        return {"others": [name for name in names if name != connection.host.name][:2]}

    return hosts.each(HostActions.describe, others)


def check_shared_memory(hosts: HostGroup, descriptions: Mapping[str, HostFacts]) -> None:
    """Refuse a host whose shared memory is full.

    Raises:
        LostError: There is one; it names it.
    """
    for connection in hosts.connections:
        name = connection.host.name
        finding = shared_memory(name, descriptions[name], connection.host.num_ranks)
        if finding.level == "fail":
            raise LostError(f"{name}: {finding.found}", hint=finding.fix, hosts=[name])


def choose_interfaces(hosts: HostGroup, job: Job, descriptions: Mapping[str, HostFacts]) -> dict[str, Chosen]:
    """Return each host's interface.

    Raises:
        LaunchError: A host has none that fits.
    """
    reached = [found.reached_at for found in descriptions.values() if found.reached_at]
    return {
        connection.host.name: choose(
            connection.host, job.launch.network_interface, descriptions[connection.host.name], reached
        )
        for connection in hosts.connections
    }


def check_fingerprints(fingerprints: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse hosts whose environments differ: ranks would crash, hang, or compute something else.

    Args:
        fingerprints: Of the environment of each host, by its name.

    Raises:
        LostError: They differ; it names the odd ones, with values.
    """
    found = fingerprint_mismatch(fingerprints)
    if found is not None:
        who = (
            f"{', '.join(found.outliers)} to the state of the others"
            if found.is_known
            else "all to one state"
        )
        raise LostError(
            "the hosts do not have the same:\n" + "\n".join(f"  {line}" for line in found.lines),
            hint=f"bring {who}: same packages, `horovod-train engine build`, same code "
            "(or launch.ship_code: true)",
            hosts=found.outliers,
        )


def check_clocks(descriptions: Mapping[str, HostFacts], max_offset_s: float) -> None:
    """Refuse a host whose clock is off, before its ranks do.

    Args:
        descriptions: What hosts have said of themselves, all asked at once: their answers may be a few
            seconds apart, which is allowed for.
        max_offset_s: The largest difference allowed.

    Raises:
        LostError: There is one; it names it.
    """
    times_s = {name: found.time_s for name, found in descriptions.items()}
    found = clock_mismatch(times_s, max_offset_s, ANSWERS_APART_S)
    if found is not None:
        raise LostError(found.lines[0], hint=CLOCK_HINT, hosts=found.outliers)


def check_reach(hosts: HostGroup, chosen: Mapping[str, Chosen]) -> None:
    """See that every host reaches the next one and the first one, as rings and rendezvous need it.

    Raises:
        LaunchError: One does not; it names both.
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
            # The one that most have trouble with; of two, the later one.
            hosts=[max(met, key=lambda name: (met[name], names.index(name)))],
        )


def rank_variables(
    job: Job,
    connection: HostConnection,
    description: HostFacts,
    interface: Chosen | None,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment that ranks of one host start with, besides what launchers give them.

    Ranks that share a host share its cores: a thread per core and rank would have them fight.
    """
    host = connection.host
    threads = job.launch.threads_per_rank or max(1, description.cores // host.num_ranks)
    variables = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if not host.is_local:
        variables |= {name: value for name, value in environ.items() if name.startswith(FORWARDED)}
        variables["PATH"] = f"{description.prefix}/bin:{description.path}"
    if interface is not None:
        variables |= {
            "HOROVOD_GLOO_IFACE": interface.name,
            "NCCL_SOCKET_IFNAME": interface.name,
            "OMPI_MCA_btl_tcp_if_include": interface.name,
        }
    else:
        # Ranks of one machine talk through its memory; over TCP they would listen on all addresses.
        variables["OMPI_MCA_btl"] = "^openib,tcp"
    if not description.reads_memory:
        # Else Open MPI tries again with each message, and says each time that it may not.
        variables["OMPI_MCA_btl_vader_single_copy_mechanism"] = "none"
    if not host.is_local:
        # The name by which the host was reached; its own name may be unknown elsewhere.
        variables["HOROVOD_TRAIN_HOST"] = host.name
    if description.has_mpi:
        variables["OPAL_PREFIX"] = description.prefix
    return {**variables, **job.launch.env, **host.settings.env}


def _with_shipped_code(job: Job, stage: str) -> tuple[Job, str]:
    file, _, attribute = job.task.rpartition(":")
    if not file.endswith(".py"):
        raise LaunchError(
            f"launch.ship_code: the task {job.task} is not a file", hint="write task: folder/file.py:Class"
        )
    moved = f"{stage}/code/{Path(file).name}:{attribute}"
    return job.model_copy(update={"task": moved}), pack_code(Path(file).parent)
