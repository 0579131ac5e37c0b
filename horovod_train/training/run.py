"""State of one rank's training run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.data.shard import num_steps
from horovod_train.frameworks.base import Reader, Replica
from horovod_train.health.finite import FiniteGuard
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.training.actions import Action
from horovod_train.training.pending_steps import PendingSteps, StepReport
from horovod_train.training.progress import Progress

if TYPE_CHECKING:
    from horovod_train.training.hooks.base import Hook


@dataclass
class Run:
    """A run of a job, on one rank.

    Attributes:
        hooks: Called after steps, results and epochs (``hooks/base.py``); may return actions.
        pending_steps: Steps whose results have not been passed to hooks yet.
        restore: Loads the checkpoint of a step; None: this run has no checkpoints.
        is_stopped: A hook has ended training.
        is_open_ended: The number of epochs is unknown, as in a user's own loop.
        pending_actions: Actions of hooks that the loop has not performed yet.
    """

    job: Job
    mesh: Mesh
    replica: Replica
    train_reader: Reader
    eval_reader: Reader | None
    policy: LearningRatePolicy
    guard: FiniteGuard
    progress: Progress
    hooks: list[Hook] = field(default_factory=list)
    pending_steps: PendingSteps = field(init=False)
    restore: Callable[[int], None] | None = None
    is_stopped: bool = False
    is_open_ended: bool = False
    pending_actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending_steps = PendingSteps(self.replica.lag_steps)

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
        """Whether training is complete or stopped."""
        return (
            self.is_stopped
            or self.progress.epoch >= self.job.train.epochs
            or (self.progress.stopped_early and self.job.evaluation.early_stopping is not None)
            or self.num_steps_left == 0
        )

    @property
    def num_steps_left(self) -> int | None:
        """Steps until ``train.max_steps``; None: no limit."""
        limit = self.job.train.max_steps
        return None if limit is None else max(0, limit - self.progress.step)

    @property
    def wants_norm(self) -> bool:
        """Whether the next step computes the gradient norm for the metric."""
        return self.job.metrics.enabled and self.progress.step % self.job.metrics.grad_norm_every_steps == 0

    @property
    def is_epoch_complete(self) -> bool:
        """Whether every sample of the current epoch was used."""
        return self.progress.cursor >= len(self.train_reader)

    def deliver(self, reports: Iterable[StepReport]) -> None:
        """Check the results of steps, and pass them to hooks, in step order.

        Raises:
            NumericError: A loss or gradient was not finite, and the job does not skip such steps.
        """
        for report in reports:
            outcome = report.outcome
            self.guard.check(
                report.step, is_finite=outcome.is_finite, loss=outcome.loss, local_loss=outcome.local_loss
            )
            self.pending_actions += filter(None, [hook.on_reading(self, report) for hook in self.hooks])

    def deliver_all(self) -> None:
        """Wait for the results of all steps, and pass them to hooks."""
        self.deliver(self.pending_steps.all())

    def planned_steps(self) -> int:
        """Return the step at which the job ends if it is not stopped early; 0: unknown."""
        if self.is_open_ended:
            return 0
        progress, train = self.progress, self.job.train
        samples = len(self.train_reader)
        epochs_to_come = max(0, train.epochs - progress.epoch - 1)
        rest = num_steps(samples, progress.cursor, self.global_batch_size)
        if progress.epoch >= train.epochs:
            rest = 0
        total = progress.step + rest + epochs_to_come * num_steps(samples, 0, self.global_batch_size)
        return total if train.max_steps is None else min(total, max(train.max_steps, progress.step))
