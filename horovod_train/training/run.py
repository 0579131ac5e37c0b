"""Everything one rank trains with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.data.shard import StepShare, num_steps
from horovod_train.frameworks.base import Reader, Replica, StepOutcome
from horovod_train.health.finite import FiniteGuard
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.training.progress import Progress


@dataclass
class Run:
    """One rank's part of one run of a job."""

    job: Job
    mesh: Mesh
    replica: Replica
    train_reader: Reader
    eval_reader: Reader | None
    policy: LearningRatePolicy
    guard: FiniteGuard
    progress: Progress
    hooks: list[Hook] = field(default_factory=list)

    @property
    def world(self) -> Communicator:
        """All ranks of the job."""
        return self.mesh.world

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.job.global_batch_size(self.mesh.data.size)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to train."""
        return (
            self.progress.epoch >= self.job.train.epochs
            or (self.progress.stopped_early and self.job.evaluation.early_stopping is not None)
            or self.num_steps_left == 0
        )

    @property
    def num_steps_left(self) -> int | None:
        """Steps until ``train.max_steps``; None: no limit."""
        limit = self.job.train.max_steps
        return None if limit is None else max(0, limit - self.progress.step)

    @property
    def is_epoch_complete(self) -> bool:
        """Whether every sample of the current epoch was used."""
        return self.progress.cursor >= len(self.train_reader)

    def planned_steps(self) -> int:
        """Return the step at which the job will end, if nothing stops it early."""
        progress, train = self.progress, self.job.train
        samples = len(self.train_reader)
        epochs_to_come = max(0, train.epochs - progress.epoch - 1)
        rest = num_steps(samples, progress.cursor, self.global_batch_size)
        if progress.epoch >= train.epochs:
            rest = 0
        total = progress.step + rest + epochs_to_come * num_steps(samples, 0, self.global_batch_size)
        return total if train.max_steps is None else min(total, max(train.max_steps, progress.step))


@dataclass(frozen=True)
class StepReport:
    """What hooks learn of a step, after ``run.progress`` has moved on."""

    share: StepShare
    outcome: StepOutcome
    lr: float

    @property
    def num_local_samples(self) -> int:
        """Samples of the step that this rank read."""
        return sum(map(len, self.share.micro_batches))


class Hook(Protocol):
    """Looks at training from outside. All hooks run on all ranks, in the order of ``run.hooks``."""

    def on_start(self, run: Run) -> None:
        """Training begins, after a resume if there is one."""
        ...

    def on_step(self, run: Run, report: StepReport) -> None:
        """An optimizer step was made."""
        ...

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        """An epoch is complete; ``run.progress.metrics`` is new if it was evaluated."""
        ...

    def on_end(self, run: Run) -> None:
        """Training is complete."""
        ...
