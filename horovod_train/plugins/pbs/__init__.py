"""Launchers of jobs in PBS."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, StringConstraints

from horovod_train.config.fields import ProgramOption, is_command, words_of
from horovod_train.config.support import Batch, BatchSystem
from horovod_train.errors import Problem

if TYPE_CHECKING:
    from horovod_train.config.schema import Job


class Pbs(Batch):
    """PBS batch job. ``run_dir`` must be on a shared filesystem, and ssh must work between its nodes."""

    options: list[ProgramOption] = []
    """Further options of qsub, such as ``-q gpu``, ``-l walltime=02:00:00`` and ``-A project``."""

    ranks_per_node: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Ranks in each chunk, with chunks on different nodes; null: chunks of one rank, as PBS places them."""

    chunk: Annotated[str, StringConstraints(pattern=r"^[A-Za-z][\w=.:-]*$")] | None = None
    """Resources of each chunk, such as ``ncpus=16:ngpus=4:mem=64gb``; null: one core for each rank."""


PBS = BatchSystem("pbs", "PBS", Pbs, r"-J", lambda settings: settings.options, is_split=True)
NODES = {"select", "nodes", "ncpus", "mpiprocs"}
"""Resources of PBS that request nodes."""


def rules(job: Job) -> Iterator[Problem]:
    """Yield problems; the number of ranks determines the nodes that are requested."""
    yield from PBS.problems(job)
    for option in job.launch.settings(Pbs).options:
        if is_command(option) and NODES & resources_of(option):
            yield Problem(
                "launch.pbs.options",
                repr(option),
                "requests nodes, as launch.num_ranks does",
                "use launch.num_ranks, launch.pbs.ranks_per_node and launch.pbs.chunk",
            )


def resources_of(option: str) -> set[str]:
    """Return the resources that options of qsub request: ``-l a=1,b=2 -lc=3``."""
    words = words_of([option])
    lists = [word for before, word in pairwise(["", *words]) if before == "-l"]
    lists += [word.removeprefix("-l") for word in words if word.startswith("-l")]
    return {part.partition("=")[0] for each in lists for part in each.split(",")}


SUPPORT = PBS.support(f"{__name__}.launcher:PbsLauncher", rules)
