"""Binding of ranks to cores.

Without binding, threads migrate between cores and NUMA nodes, which reduces memory bandwidth. Each rank binds
itself before any library starts threads, so that the binding is the same under every launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

NODES = Path("/sys/devices/system/node")
# Variables of launchers with the local rank and the number of ranks of the host.
_LOCAL = (
    ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra
)


def choose_cores(
    mode: Literal["auto", "none", "cores", "numa"],
    nodes: Sequence[Sequence[int]],
    allowed: frozenset[int],
    local_rank: int,
    local_size: int,
) -> frozenset[int] | None:
    """Return the cores of a rank; None: the rank is not bound.

    Args:
        mode: The job's ``launch.cpu_binding``.
        nodes: Cores of each NUMA node of the host.
        allowed: Cores that the launcher or the container allows for this process.
        local_rank: Rank on its host.
        local_size: Number of ranks on the host.
    """
    usable = [cores for node in nodes if (cores := [core for core in node if core in allowed])]
    if mode == "auto":
        mode = "numa" if len(usable) > 1 else "none"
    if mode == "none" or local_size < 2 or len(allowed) < local_size:
        return None
    if mode == "numa":
        if len(usable) < 2 or local_size < len(usable):
            return None
        return frozenset(usable[local_rank * len(usable) // local_size])
    # Adjacent cores in this order are in the same NUMA node.
    ordered = [core for node in usable for core in node] or sorted(allowed)
    first, last = (number * len(ordered) // local_size for number in (local_rank, local_rank + 1))
    return frozenset(ordered[first:last])


def bind(mode: Literal["auto", "none", "cores", "numa"], environ: Mapping[str, str] = os.environ) -> None:
    """Bind this process to cores, according to the environment variables of its launcher."""
    for rank, size in _LOCAL:
        if rank in environ and size in environ:
            allowed = frozenset(os.sched_getaffinity(0))
            chosen = choose_cores(mode, read_nodes(NODES), allowed, int(environ[rank]), int(environ[size]))
            if chosen is not None:
                os.sched_setaffinity(0, chosen)
            return


def read_nodes(folder: Path) -> list[list[int]]:
    """Return the cores of each NUMA node; empty if the system does not provide them."""
    files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:]))
    return [cores_of(file.read_text()) for file in files]


def cores_of(text: str) -> list[int]:
    """Return the cores of a list in the format of the kernel.

    >>> cores_of("0-2,8")
    [0, 1, 2, 8]
    """
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found
