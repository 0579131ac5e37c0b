"""State of one rank's training run.

    Progress, plan_epoch     the plain numbers from which a job resumes, and the remaining steps in an epoch
    ExitPreempted, Stop, RestoreCheckpoint
                             actions that hooks return; None: continue
    StepReport               description of a step for hooks
    PendingSteps             queue of steps whose results are pending
    Callbacks, Run           methods that the loop calls, and the run

A hook must return the same action at the same step on every rank. It derives the action from values that
are equal on all ranks (losses, metrics, progress) or that were exchanged. Only the first action is
performed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from time import monotonic, sleep
from typing import Any

from horovod_train.collectives.base import Communicator, Mesh
from horovod_train.config.arguments import batch_size_at, samples_of_growth
from horovod_train.config.fields import Duration
from horovod_train.config.schema import Job, Train
from horovod_train.data.order import DataOrder, order_of, resumed
from horovod_train.data.shard import (
    PlannedSteps,
    StepShare,
    StepsOfEpoch,
    num_steps,
)
from horovod_train.errors import UserError
from horovod_train.frameworks.base import PendingOutcome, Reader, Replica, StepOutcome
from horovod_train.health.comparisons import FiniteGuard
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.lr.scaling import gain
from horovod_train.lr.schedules import PlateauState
from horovod_train.training.noise import NoiseMoments


@dataclass
class PassedIntervals:
    """How often an interval has passed.

    Attributes:
        interval: The interval, as text; empty: unknown, in checkpoints of previous versions.
        number: How often it has passed.
    """

    interval: str = ""
    number: int = 0


@dataclass
class Progress:
    """Progress of training.

    Attributes:
        order: Settings that determine the order of samples.
        step: Optimizer steps performed.
        epoch: Epochs completed.
        cursor: Samples of the current epoch used by all ranks together.
        metrics: Result of the last evaluation.
        metrics_step: Optimizer steps performed before that evaluation; -1: none.
        best_metric: Best value of the early-stopping metric so far.
        num_without_improvement: Evaluations since ``best_metric``.
        stopped_early: Whether early stopping has ended training.
        plateau: Reductions of the learning rate by ``lr.decay: plateau``.
        noise: Moments of the gradient noise, if they are measured.
        scaled_epochs: Scale-invariant progress under AdaScale; otherwise equal to ``epochs_passed``.
        evaluation: The interval of evaluations, and how often it had passed at the last evaluation.
        skipped: Parts that were skipped after spikes of the loss: positions of the first sample, and of the
            one after the last, in samples from the start of the training.
        epochs_of_steps: Epochs of each position that a schedule gives in steps. Those that have passed stay
            as they were, also on another number of ranks.
    """

    order: DataOrder
    step: int = 0
    epoch: int = 0
    cursor: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_step: int = -1
    best_metric: float | None = None
    num_without_improvement: int = 0
    stopped_early: bool = False
    plateau: PlateauState = field(default_factory=PlateauState)
    noise: NoiseMoments = field(default_factory=NoiseMoments)
    scaled_epochs: float = 0.0
    evaluation: PassedIntervals = field(default_factory=PassedIntervals)
    epochs_of_steps: dict[str, float] = field(default_factory=dict)
    skipped: list[list[int]] = field(default_factory=list)

    @property
    def epochs_passed(self) -> float:
        """Epochs completed, with the fraction of the current one."""
        return self.epoch + self.cursor / self.order.num_samples

    def num_passed(self, interval: Duration, *, is_before: bool = False) -> int:
        """Return how often an interval has passed since the start of the training.

        Args:
            interval: The interval.
            is_before: Return it for just before the last step has ended.
        """
        length = self.order.num_samples
        num_samples = self.epoch * length + self.cursor
        return interval.num_passed(
            step=self.step - is_before, num_samples=num_samples - is_before, samples_per_epoch=length
        )

    def advance(self, num_samples: int, scaled_epochs: float) -> None:
        """Count an optimizer step, its samples on all ranks, and its scale-invariant progress in epochs."""
        self.step += 1
        self.cursor += num_samples
        self.scaled_epochs += scaled_epochs

    def skip_to(self, position: int, *, is_scaled: bool) -> None:
        """Leave out the samples before a position; ``is_scaled``: scale-invariant progress goes on, too."""
        length = self.order.num_samples
        now = self.epoch * length + self.cursor
        self.skipped.append([now, position])
        # At the end of an epoch, the epoch is still to be completed.
        self.epoch, self.cursor = (position - 1) // length, (position - 1) % length + 1
        if is_scaled:
            self.scaled_epochs += (position - now) / length

    def finish_epoch(self) -> None:
        """Count a completed epoch."""
        self.epoch += 1
        self.cursor = 0

    @property
    def current_metrics(self) -> dict[str, float]:
        """Metrics of the current weights; empty: they were not evaluated."""
        return self.metrics if self.metrics_step == self.step else {}

    def to_json(self) -> dict[str, object]:
        """Return plain JSON. Defaults of the order are left out, which older versions do not know."""
        order = {
            each.name: value
            for each in fields(DataOrder)
            if (value := getattr(self.order, each.name)) != each.default
        }
        document = {**asdict(self), "order": order}
        if not self.skipped:
            del document["skipped"]
        return document

    def restore(self, document: Mapping[str, Any]) -> None:
        """Load the progress of a checkpoint.

        Raises:
            UserError: The checkpoint is within an epoch, and the order of samples has changed.
        """
        found = {"skipped": [], **document}
        old = DataOrder(**found.pop("order"))
        self.order = resumed(old, self.order)
        is_within = old.num_in_pass or self.order.num_in_pass or found["cursor"] > 0
        if is_within and old != self.order:
            changed = [
                f"{name} was {before} and is {now}"
                for name, before in asdict(old).items()
                if (now := asdict(self.order)[name]) != before
            ]
            raise UserError(
                "the checkpoint was saved within an epoch, or within a pass over the data, with another "
                "order of samples: " + "; ".join(changed),
                hint="restore these settings until the epoch is complete, or use another name",
            )
        for name, kind in (
            ("plateau", PlateauState),
            ("noise", NoiseMoments),
            ("evaluation", PassedIntervals),
            ("epochs_of_steps", dict),
        ):
            value = found.get(name)  # absent in checkpoints of former versions
            found[name] = kind() if value is None else kind(**value)
        for name, value in found.items():
            setattr(self, name, value)
        if found.get("scaled_epochs") is None:
            self.scaled_epochs = self.epochs_passed


def plan_epoch(
    ranks: Communicator,
    reader: Reader,
    progress: Progress,
    *,
    batch_size_per_rank: int,
    accumulation_steps: int,
    global_batch_size: int,
    batch_size_at: Callable[[float], int],
    max_steps: int | None = None,
    equal_micro_batches: bool = False,
) -> PlannedSteps:
    """Return the remaining steps of the current epoch, at most ``max_steps``; None: no limit.

    The samples are distributed over ``ranks``. A step has ``batch_size_at(epochs passed)`` samples, at most
    ``global_batch_size``, in at most ``accumulation_steps`` micro-batches of at most ``batch_size_per_rank``
    samples. With ``equal_micro_batches``, all ranks read the same number of micro-batches.
    """
    order = progress.order
    shares = StepsOfEpoch(
        num_samples=order.num_samples,
        cursor=progress.cursor,
        batch_size_per_rank=batch_size_per_rank,
        accumulation_steps=accumulation_steps,
        rank=ranks.rank,
        size=ranks.size,
        equal_micro_batches=equal_micro_batches,
        global_batch_size=global_batch_size,
        batch_size_at=lambda cursor: batch_size_at(progress.epoch + cursor / order.num_samples),
        max_steps=max_steps,
    )
    places = order_of(order, reader.dataset, progress.epoch)
    return PlannedSteps(shares, partial(reader.read, progress.epoch, places), progress.epoch)


@dataclass(frozen=True)
class ExitPreempted:
    """Exit with code 75 after ``step`` optimizer steps: a checkpoint is saved, and the next start resumes."""

    step: int


@dataclass(frozen=True)
class Stop:
    """End training after ``step`` optimizer steps: evaluate and save as after the last epoch.

    The next start resumes from this checkpoint. ``why`` is the reason in the log.
    """

    step: int
    why: str


@dataclass(frozen=True)
class RestoreCheckpoint:
    """Resume from this run's checkpoint of ``step``, and discard later ones; ``why`` is for the log.

    ``resume_at`` is the position in the training from which samples are used, counted in samples from its
    start; None: that of the checkpoint.
    """

    step: int
    why: str
    resume_at: int | None = None


Action = ExitPreempted | Stop | RestoreCheckpoint


DRAIN_TIMEOUT_S = 5.0


@dataclass(slots=True)  # not frozen: creating a frozen instance takes four times as long
class StepReport:
    """Description of a step for hooks.

    Attributes:
        step: Number of optimizer steps performed, including this one.
        epochs_passed: Epochs passed after this step, with the fraction of the current one.
        share: This rank's part of the step's samples.
        lr: Learning rate of the step.
        pending_outcome: Future of the result.
        derived: Numbers that a hook has derived from the results of steps, by name in the catalog of metrics.
    """

    step: int
    epochs_passed: float
    share: StepShare
    lr: float
    pending_outcome: PendingOutcome
    derived: dict[str, float] = field(default_factory=dict)

    @property
    def numbers(self) -> Mapping[str, float | None]:
        """Numbers of the result, and derived numbers; waits for the result."""
        return {**self.outcome.numbers, **self.derived}

    @property
    def outcome(self) -> StepOutcome:
        """Result of the step; waits for it. Hooks receive steps whose results are available."""
        return self.pending_outcome.outcome()


class PendingSteps:
    """Steps whose results have not been passed to hooks yet.

    On a CPU, loss, gradient norm and phases are available after the step. On a device, they become
    available while later steps run, and the host must not wait for them in each step. Code that requires
    the results (before a save, at the end of an epoch) waits for all pending steps.

    Results are delivered ``lag_steps`` steps later. The delay is fixed and does not depend on availability,
    because all ranks must act on a result after the same step.
    """

    def __init__(self, lag_steps: int = 0) -> None:
        self._lag_steps = lag_steps
        self._pending: deque[StepReport] = deque()

    def add(self, report: StepReport) -> None:
        """Add the latest step."""
        self._pending.append(report)

    def ready(self) -> Iterator[StepReport]:
        """Yield the steps whose results are due, in order."""
        while len(self._pending) > self._lag_steps:
            yield self._pending.popleft()

    def all(self) -> Iterator[StepReport]:
        """Yield all pending steps. Their ``outcome`` waits for the result."""
        while self._pending:
            yield self._pending.popleft()

    def drain(self) -> Iterator[StepReport]:
        """Yield steps with results available in ``DRAIN_TIMEOUT_S``, because a failed device may hang."""
        until_s = monotonic() + DRAIN_TIMEOUT_S
        while self._pending:
            while not self._pending[0].pending_outcome.is_ready():
                if monotonic() > until_s:
                    return
                sleep(0.01)
            yield self._pending.popleft()

    def clear(self) -> None:
        """Discard all pending steps."""
        self._pending.clear()


class Callbacks:
    """Methods that the loop calls. They do nothing here.

    They must return the same action on all ranks; None: continue.
    """

    def on_start(self, run: Run) -> None:
        """Called once before the first step; a checkpoint to resume from is loaded already."""

    def on_result(self, run: Run, report: StepReport) -> Action | None:
        """Called with the result of a step, in step order; ``run.progress`` may be some steps ahead."""
        return None

    def on_step(self, run: Run) -> Action | None:
        """Called after each optimizer step, which ``run.progress`` includes; its result may be pending."""
        return None

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """Called before and after an evaluation; after it, ``run.progress.metrics`` has the results."""

    def on_epoch(self, run: Run, *, evaluated: bool) -> Action | None:
        """Called after each epoch; ``evaluated``: whether the weights at its end were evaluated."""
        return None

    def on_end(self, run: Run) -> None:
        """Called when training is complete."""


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
    hooks: list[Callbacks] = field(default_factory=list)
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
        return self.progress.cursor >= self.progress.order.num_samples

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
            self.pending_actions += filter(None, [hook.on_result(self, report) for hook in self.hooks])

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
