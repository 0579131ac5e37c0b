"""Launchers of jobs in Grid Engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import StringConstraints

from horovod_train.config.fields import ProgramOption
from horovod_train.config.support import Batch, BatchSystem
from horovod_train.errors import Problem

if TYPE_CHECKING:
    from horovod_train.config.schema import Job


class GridEngine(Batch):
    """Grid Engine batch job. ``run_dir`` must be on a shared filesystem."""

    options: list[ProgramOption] = []
    """Further options of qsub, such as ``-q gpu.q``, ``-l h_rt=02:00:00`` and ``-P project``."""

    parallel_environment: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None
    ) = None
    """Parallel environment, one of ``qconf -spl``, which places the ranks; needed for more than one rank."""


GRID_ENGINE = BatchSystem(
    "gridengine",
    "Grid Engine",
    GridEngine,
    r"-t\s",
    lambda settings: settings.options,
    is_split=True,
    requires_mpi=True,
)


def rules(job: Job) -> Iterator[Problem]:
    """Yield problems; several ranks need a parallel environment."""
    yield from GRID_ENGINE.problems(job)
    launch = job.launch
    is_placed = launch.most_ranks == 1 or launch.settings(GridEngine).parallel_environment is not None
    if launch.launcher == GRID_ENGINE.launcher and not is_placed:
        yield Problem(
            "launch.gridengine.parallel_environment",
            "null",
            f"is needed for {launch.most_ranks} ranks",
            "use one of the parallel environments that `qconf -spl` prints",
        )


SUPPORT = GRID_ENGINE.support(f"{__name__}.launcher:GridEngineLauncher", rules)
