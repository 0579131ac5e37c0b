"""State of one rank's training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.batches import batch_size_at, samples_of_growth
from horovod_train.config.duration import Duration
from horovod_train.config.schema import Job, Train
from horovod_train.data.shard import num_steps
from horovod_train.frameworks.base import Reader, Replica
from horovod_train.health.finite import FiniteGuard
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.lr.scaling import gain
from horovod_train.training.actions import Action
from horovod_train.training.pending_steps import PendingSteps, StepReport
from horovod_train.training.progress import PassedIntervals, Progress

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

    def batch_size_at(self, epochs: float) -> int:
        """Return the samples of the step that begins after a number of epochs."""
        return batch_size_at(self.job.train, self.global_batch_size, epochs)

    def lr_of(self, num_samples: int) -> float:
        """Return the learning rate of the next step, which has ``num_samples`` over all ranks."""
        progress = self.progress
        plateau = progress.plateau.factor if self.policy.schedule.metric_name is not None else 1.0
        if not self.policy.scaled.follows_gain:
            return self.policy.at(progress.epochs_passed, plateau_factor=plateau)
        return self.policy.at(progress.scaled_epochs, gain=self.gain_of(num_samples), plateau_factor=plateau)

    def gain_of(self, num_samples: int) -> float:
        """Return the gain of AdaScale for a step of ``num_samples``, from the moments measured so far."""
        noise, reference = self.progress.noise, self.job.lr.reference_batch_size
        if not noise.num_measured:
            return min(1.0, num_samples / reference)
        return gain(noise.covariance, noise.square_norm, num_samples, reference)

    def scaled_epochs_of(self, num_samples: int) -> float:
        """Return the scale-invariant progress of the next step in epochs; without AdaScale, its epochs."""
        length = self.progress.order.num_samples
        if not self.policy.scaled.follows_gain:
            return num_samples / length
        return self.gain_of(num_samples) * self.job.lr.reference_batch_size / length

    @property
    def schedule_epochs(self) -> float:
        """Progress that schedules follow, in epochs: under AdaScale, the scale-invariant progress."""
        is_scaled = self.policy.scaled.follows_gain
        return self.progress.scaled_epochs if is_scaled else self.progress.epochs_passed

    @property
    def has_all_epochs(self) -> bool:
        """Whether the epochs of the job are complete; under AdaScale, its scale-invariant epochs."""
        if self.policy.scaled.follows_gain:
            return self.progress.scaled_epochs >= self.job.train.most_epochs
        return self.progress.epoch >= self.job.train.most_epochs

    @property
    def is_done(self) -> bool:
        """Whether training is complete or stopped."""
        return (
            self.is_stopped
            or self.has_all_epochs
            or (self.progress.stopped_early and self.job.evaluation.early_stopping is not None)
            or self.is_limit_reached
        )

    @property
    def is_limit_reached(self) -> bool:
        """Whether ``train.max_steps``, ``max_samples`` or ``stop_at_step`` ends training now."""
        limits = [self.job.train.limit]
        if (last := self.job.train.stop_at_step) is not None:
            limits.append(Duration(last, "steps"))
        return any(each is not None and self.progress.num_passed(each) > 0 for each in limits)

    @property
    def num_steps_left(self) -> int | None:
        """Steps until ``train.max_steps``, ``max_samples`` or ``stop_at_step``; None: no limit."""
        train, limits = self.job.train, []
        if train.limit is not None:
            limits.append(self._end_within(math.inf)[0])
        if train.stop_at_step is not None:
            limits.append(train.stop_at_step)
        return max(0, min(limits) - self.progress.step) if limits else None

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

    @property
    def num_epochs(self) -> int:
        """Epochs that the job begins, if it is not stopped early."""
        return min(self.job.train.most_epochs, math.ceil(self.policy.total_epochs))

    def in_epochs(self, duration: Duration) -> Duration:
        """Return a duration or position in epochs.

        The step of a number is that of the present ranks, if it is in the future; a position that has passed
        remains where it was. Under AdaScale, steps are those of the reference batch.
        """
        num_samples, progress = self.progress.order.num_samples, self.progress
        if duration.unit == "epochs":
            return duration
        if duration.unit == "samples":
            return Duration(duration.amount / num_samples)
        if self.policy.scaled.follows_gain:
            return Duration(duration.amount * self.job.lr.reference_batch_size / num_samples)
        step, known = int(duration.amount), progress.epochs_of_steps
        if step > progress.step:
            known[str(step)] = self._planned(step, math.inf)[1]
        elif str(step) not in known:
            known[str(step)] = progress.epochs_passed * step / max(1, progress.step)
        return Duration(known[str(step)])

    def batch_warmup_in_epochs(self) -> Train:
        """Return the section ``train`` with a batch warm-up whose length is in epochs."""
        train, warmup = self.job.train, self.job.train.batch_warmup
        if warmup is None or warmup.length.unit == "epochs":
            return train
        num_samples = warmup.length.amount
        if warmup.length.unit == "steps":
            num_samples = samples_of_growth(warmup.start, self.global_batch_size, num_samples)
        known, key = self.progress.epochs_of_steps, f"batch_warmup {warmup.length}"
        if not known.get(key, math.inf) <= self.progress.epochs_passed:  # otherwise, it has ended
            known[key] = num_samples / self.progress.order.num_samples
        length = Duration(known[key])
        return train.model_copy(update={"batch_warmup": warmup.model_copy(update={"length": length})})

    def convert_durations(self) -> None:
        """Convert the durations of schedules to epochs, with the present ranks and the position.

        Raises:
            UserError: The schedule is not valid, such as with a warm-up that is longer than the training.
        """
        if not self.policy.is_in_epochs:
            train = self.batch_warmup_in_epochs()
            self.job = self.job.model_copy(update={"train": train})
            self.policy = self.policy.in_epochs(self.in_epochs, train)
            if not self.progress.step:  # later, other ranks may have made it impossible
                self.policy.check()

    def note_passed_evaluation(self) -> None:
        """Record that the evaluation which is due at this position was performed, or is not needed."""
        every = self.job.evaluation.every
        self.progress.evaluation = PassedIntervals(str(every), self.progress.num_passed(every))

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the interval of evaluations has passed since the last one."""
        if self.eval_reader is None:
            return False
        return self.progress.num_passed(self.job.evaluation.every) > self.progress.evaluation.number

    def planned_steps(self) -> int:
        """Return the step at which the job ends if it is not stopped early; 0: unknown."""
        if self.is_open_ended:
            return 0
        progress, train = self.progress, self.job.train
        if not self.policy.scaled.follows_gain:
            return self.planned_end()[0]
        left = max(0.0, train.most_epochs - progress.scaled_epochs)
        total = progress.step + math.ceil(left / self.scaled_epochs_of(self.global_batch_size))
        return total if train.limit is None else min(total, self._end_within(math.inf)[0])

    def planned_end(self) -> tuple[int, float]:
        """Return the step and the epochs at which ``train.epochs`` or ``train.limit`` end the job."""
        return self._end_within(self.job.train.most_epochs)

    def _end_within(self, most_epochs: float) -> tuple[int, float]:
        """Return the step and the epochs at which a number of epochs or ``train.limit`` end the job."""
        train = self.job.train
        last = math.inf if train.max_steps is None else train.max_steps
        if train.max_samples is None:
            return self._planned(last, most_epochs)
        whole, rest = divmod(train.max_samples, self.progress.order.num_samples)
        return self._planned(last, *((whole, rest) if whole < most_epochs else (most_epochs, 0)))

    def _planned(self, last: float, most_epochs: float, rest: int = 0) -> tuple[int, float]:
        """Return the step and the epochs at which a number of steps, or of epochs and samples, is complete.

        Args:
            last: Number of steps.
            most_epochs: Number of epochs.
            rest: Samples of the next epoch.
        """
        num_samples, size = self.progress.order.num_samples, self.global_batch_size
        step, epoch, cursor = self.progress.step, self.progress.epoch, self.progress.cursor
        if cursor >= num_samples:  # a checkpoint of the last step of an epoch
            epoch, cursor = epoch + 1, 0
        while epoch < most_epochs and step < last:
            count = 1
            size_now = self.batch_size_at(epoch + cursor / num_samples)
            if size_now == size:
                count = int(min(num_steps(num_samples, cursor, size), last - step))
                whole = int(min(most_epochs - epoch, (last - step) // count)) if cursor == 0 else 0
                if whole > 1:
                    step, epoch = step + whole * count, epoch + whole
                    continue
            step, cursor = step + count, cursor + count * size_now
            if cursor >= num_samples:
                epoch, cursor = epoch + 1, 0
        while epoch == most_epochs and cursor < rest and step < last:
            size_now = self.batch_size_at(epoch + cursor / num_samples)
            count = int(min(num_steps(rest, cursor, size), last - step)) if size_now == size else 1
            step, cursor = step + count, cursor + count * size_now
        return step, min(epoch + cursor / num_samples, epoch + 1)
