"""Launchers of jobs in Flux."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from horovod_train.config.fields import ProgramOption
from horovod_train.config.support import Batch, BatchSystem


class Flux(Batch):
    """Flux batch job. ``run_dir`` must be on a shared filesystem."""

    options: list[ProgramOption] = []
    """Further options of flux batch, such as ``--queue=gpu``, ``--time-limit=2h``, ``--gpus-per-slot=1``."""

    ranks_per_node: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Ranks on each node; null: all ranks on one node."""


FLUX = BatchSystem(
    "flux",
    "Flux",
    Flux,
    r"(?!)",  # flux batch submits no arrays
    lambda settings: settings.options,
    is_split=True,
    requires_mpi=True,
)
SUPPORT = FLUX.support(f"{__name__}.launcher:FluxLauncher")
