"""Launchers of jobs in Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, StringConstraints

from horovod_train.config.fields import OneLine
from horovod_train.config.support import Batch, BatchSystem
from horovod_train.errors import Problem

if TYPE_CHECKING:
    from horovod_train.config.schema import Job


class Slurm(Batch):
    """Slurm batch job. ``run_dir`` must be on a shared filesystem."""

    options: dict[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]*$")], OneLine] = {}
    """Further long options of sbatch, such as ``partition: gpu``, ``time: "2:00:00"``, ``gres: "gpu:4"``."""

    ranks_per_node: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Ranks on each node; null: as Slurm places them."""

    mpi: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")] = "auto"
    """How ranks of the MPI controller start: mpirun; srun, with an interface that Slurm and the MPI library
    support; an interface of ``srun --mpi=list``, such as pmix; auto: mpirun if the MPI library has one."""


SLURM = BatchSystem(
    "slurm", "Slurm", Slurm, r"--array", lambda settings: [f"--{name}" for name in settings.options]
)


def rules(job: Job) -> Iterator[Problem]:
    """Yield problems; ``mpi`` has no effect without MPI."""
    yield from SLURM.problems(job)
    wanted = job.launch.settings(Slurm).mpi
    if wanted != "auto" and job.launch.controller != "mpi":
        yield Problem(
            "launch.slurm.mpi",
            repr(wanted),
            f"has no effect with launch.controller: {job.launch.controller}",
            "leave it out, or use launch.controller: mpi",
        )


SUPPORT = SLURM.support(f"{__name__}.launcher:SlurmLauncher", rules)
