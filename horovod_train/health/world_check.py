"""Check, before training, that the number of ranks is correct and that all ranks run the same job and code.

Otherwise, a difference may cause a hang or diverging weights, or may remain undetected.
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
    """Raise ``WorldError`` if the number of ranks is not the job's, or if ranks differ. Collective.

    Job, environment (``environment_fingerprint``: code, versions, engine) and clocks are compared.
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
    # The all-gather above has synchronized the ranks, so a difference in time is a difference of clocks.
    check_clocks(hosts, allgather_json(world, time.time()), job.health.max_clock_offset_s)


def check_fingerprints(hosts: Sequence[str], fingerprints: Sequence[Mapping[str, str]]) -> None:
    """Raise ``WorldError`` with ranks, hosts and values if the fingerprints of ranks differ."""

    def named(ranks: Sequence[str]) -> str:
        numbers = [int(rank) for rank in ranks]
        where = ", ".join(sorted({hosts[rank] for rank in numbers}))
        return f"{describe_ranks(numbers)} ({where})"

    found = fingerprint_mismatch({str(rank): each for rank, each in enumerate(fingerprints)}, named)
    if found is not None:
        more = f"; and {len(found.lines) - MAX_NAMED} more" if len(found.lines) > MAX_NAMED else ""
        raise WorldError(
            "job, code or environment differ between ranks. " + " | ".join(found.lines[:MAX_NAMED]) + more,
            hint="install the same job, code, packages and engine on all hosts"
            + (f"; {SEVERAL_MODELS}" if any("horovod build" in line for line in found.lines) else ""),
        )


def check_clocks(hosts: Sequence[str], times_s: Sequence[float], max_offset_s: float) -> None:
    """Raise ``WorldError`` if clocks differ, because logs and metrics of ranks could not be ordered.

    The clocks of all ranks must be read at the same moment.
    """
    by_rank = {str(rank): time_s for rank, time_s in enumerate(times_s)}
    found = clock_mismatch(by_rank, max_offset_s, named=lambda rank: f"{hosts[int(rank)]} (rank {rank})")
    if found is not None:
        raise WorldError(found.lines[0], hint=CLOCK_HINT)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
