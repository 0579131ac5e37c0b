"""Launchers of jobs in LSF."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from horovod_train.config.fields import ProgramOption
from horovod_train.config.support import Batch, BatchSystem


class Lsf(Batch):
    """LSF batch job, which is rendered only. ``run_dir`` must be on a shared filesystem."""

    options: list[ProgramOption] = []
    """Further options of bsub, such as ``-q gpu``, ``-W 2:00`` and ``-P project``."""

    ranks_per_node: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Ranks on each node; null: as LSF places them."""


LSF = BatchSystem("lsf", "LSF", Lsf, r"-J.*\[", lambda settings: settings.options, requires_mpi=True)
SUPPORT = LSF.support(f"{__name__}.launcher:LsfLauncher")
