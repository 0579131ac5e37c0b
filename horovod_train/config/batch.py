"""What batch systems have in common: settings of their jobs, and rules for these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from horovod_train.config.fields import OneLine, Section, is_command
from horovod_train.errors import Problem

if TYPE_CHECKING:
    from horovod_train.config.schema import Job


class Batch(Section):
    """Settings of a batch job. ``run_dir`` must be on a shared filesystem."""

    requeue: bool = True
    """Requeue the job if it is preempted before its time limit."""

    setup: list[OneLine] = []
    """Shell commands at the start of the batch script, such as ``module load cuda``."""


@dataclass(frozen=True)
class BatchSystem:
    """A batch system.

    Attributes:
        launcher: Name of the launcher that submits jobs, and of the section of its settings in ``launch``;
            ``launcher``-allocation starts ranks in an allocation.
        name: Name in messages.
        settings: Model of the section.
        array: Regular expression of the beginning of an option that submits a job array.
        options: Returns the options of a job, as they are written in a script.
        is_split: Options are split into arguments, as a shell does.
        requires_mpi: Only the process managers of MPI start ranks.
    """

    launcher: str
    name: str
    settings: type[Batch]
    array: str
    options: Callable[..., Sequence[str]]
    is_split: bool = False
    requires_mpi: bool = False

    def problems(self, job: Job) -> Iterator[Problem]:
        """Yield the problems of a job with this batch system."""
        settings = job.launch.settings(self.settings)
        if job.launch.launcher in (self.launcher, f"{self.launcher}-allocation"):
            yield from self._problems_of_launch(job)
        path = f"launch.{self.launcher}.options"
        for option in self.options(settings):
            if self.is_split and not is_command(option):
                yield Problem(path, repr(option), "cannot be split", "close its quotes")
            if re.match(self.array, option):
                yield Problem(
                    path,
                    repr(option),
                    "submits a job array, and each of its jobs would be this run",
                    f"call `horovod-train run --launcher {self.launcher}-allocation` in a batch script of "
                    "yours",
                )

    def _problems_of_launch(self, job: Job) -> Iterator[Problem]:
        if job.launch.elastic is not None:
            yield Problem(
                "launch.elastic",
                "",
                f"is not for {self.name}, whose jobs keep their nodes",
                f"leave it out: launch.{self.launcher}.requeue puts the job back into the queue",
            )
        if self.requires_mpi and job.launch.controller != "mpi":
            yield Problem(
                "launch.controller",
                repr(job.launch.controller),
                f"is not available in {self.name}, where MPI starts the ranks",
                "use mpi",
            )
