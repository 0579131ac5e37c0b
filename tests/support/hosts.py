"""What hosts say of themselves, as good hosts do unless told otherwise."""

from __future__ import annotations

from dataclasses import replace

from horovod_train.checks.hosts import HostFacts

GOOD = HostFacts(
    python="/p/bin/python",
    prefix="/p",
    mpi="Open MPI 4.1.8",
    mpi_programs="/p/bin",
    mpi_environment={},
    path="/bin",
    cores=8,
    has_fabric=False,
    reads_memory=True,
    addresses={"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    ssh_address="10.0.0.1",
    ways={},
    time_s=0.0,
    shared_memory_bytes=2**30,
)


def described(**changes: object) -> HostFacts:
    """A host that differs in this from a good one."""
    return replace(GOOD, **changes)
