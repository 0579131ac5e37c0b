"""Before training: the ranks are those that were asked for, and all of them run the same.

A difference would otherwise show up late, as a hang, as weights that drift apart, or not at all.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence

from horovod_train.checks.consistency import CLOCK_HINT, clock_mismatch, fingerprint_mismatch
from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.config.schema import Job
from horovod_train.errors import WorldError, describe_ranks

MAX_NAMED = 4
SEVERAL_MODELS = (
    "hosts whose GPUs are of several models need one engine for all: HOROVOD_BUILD_CUDA_CC_LIST=80,90 (say) "
    "at `horovod-train engine build` on each"
)


def check_world(job: Job, world: Communicator, environment: Mapping[str, str]) -> None:
    """Refuse a world that is not the one asked for, or whose ranks are not alike; all ranks call it.

    Args:
        job: The job.
        world: The ranks.
        environment: What this rank trains with (``environment_fingerprint``).

    Raises:
        WorldError: The number of ranks differs; or job, code, versions, engine or clocks do.
    """
    wanted = job.launch.num_ranks
    if wanted is not None and wanted != world.size:
        raise WorldError(
            f"the job asks for {wanted} ranks, but this world has {world.size}",
            hint="start as many ranks as launch.num_ranks says, or leave it out",
        )
    if world.size == 1:
        return
    mine = {"job": _digest(job.model_dump_json()), **environment}
    known = allgather_json(world, [world.host, mine])
    hosts = [host for host, _ in known]
    check_fingerprints(hosts, [fingerprint for _, fingerprint in known])
    # The exchange above has brought the ranks together: what differs now is their clocks.
    check_clocks(hosts, allgather_json(world, time.time()), job.health.max_clock_offset_s)


def check_fingerprints(hosts: Sequence[str], fingerprints: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that differ.

    Args:
        hosts: Host of each rank.
        fingerprints: Of the environment of each rank.

    Raises:
        WorldError: They differ; it names ranks, hosts and values.
    """

    def named(ranks: Sequence[str]) -> str:
        numbers = [int(rank) for rank in ranks]
        where = ", ".join(sorted({hosts[rank] for rank in numbers}))
        return f"{describe_ranks(numbers)} ({where})"

    found = fingerprint_mismatch({str(rank): each for rank, each in enumerate(fingerprints)}, named)
    if found is not None:
        more = f"; and {len(found.lines) - MAX_NAMED} more" if len(found.lines) > MAX_NAMED else ""
        raise WorldError(
            "ranks do not run the same. " + " | ".join(found.lines[:MAX_NAMED]) + more,
            hint="bring the same job, code, packages and engine to every host"
            + (f"; {SEVERAL_MODELS}" if any("horovod build" in line for line in found.lines) else ""),
        )


def check_clocks(hosts: Sequence[str], times_s: Sequence[float], max_offset_s: float) -> None:
    """Refuse clocks that differ: logs and metrics of the ranks could not be put in order.

    Args:
        hosts: Host of each rank.
        times_s: What each rank's clock says, taken at the same moment, in seconds.
        max_offset_s: The largest difference allowed between two of them.

    Raises:
        WorldError: They differ by more.
    """
    by_rank = {str(rank): time_s for rank, time_s in enumerate(times_s)}
    found = clock_mismatch(by_rank, max_offset_s, named=lambda rank: f"{hosts[int(rank)]} (rank {rank})")
    if found is not None:
        raise WorldError(found.lines[0], hint=CLOCK_HINT)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
