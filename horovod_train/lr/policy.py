"""The learning rate as a pure function of progress and global batch.

The rate of a step is a function of the epochs passed (a fraction, independent of the number of steps), the
length of the job, the global batch, and the sections ``lr`` and ``train.batch_warmup``. A job that resumes on
another number of ranks has the correct rate.

.. code-block:: text

    k      = global batch / reference batch
    peak   = base_lr * rule(k)                         the rule of lr.scaling (lr/scaling.py)

    e      = epochs passed, w = warm-up in epochs (scaled by the rule), E = epochs of the whole job
    e < w:   rate = start + (peak - start) * e / w     start = warmup_start_lr, or min(base_lr, peak);
                                                       under AdaScale gain * warmup_start_lr
    e >= w:  rate = peak * schedule(e)                 the schedule of lr.decay (lr/schedules.py)

Two inputs are measured during training, are equal on all ranks, and are stored in checkpoints: the gain of
AdaScale and the factor of ``decay: plateau``, by which all of it is multiplied.

    LearningRatePolicy   the learning rate of a job
    ArgumentSchedules    schedules of an optimizer's arguments, such as momentum and weight decay
    ArgumentScaling      arguments of a job's optimizer, scaled to the global batch by the rules of ``lr``
    chart                text charts of a schedule, for the terminal
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from horovod_train.config.arguments import batch_size_at, batch_size_of_lr
from horovod_train.config.fields import Duration
from horovod_train.config.optimization import AUTO, LearningRate, Scaled
from horovod_train.config.schema import Job, Train
from horovod_train.errors import UserError
from horovod_train.lr.schedules import Position, Schedule, interpolated, schedule_of, valid
from horovod_train.registry import DEFAULT_SCALING, SCALINGS, SCHEDULES, load_location

NUM_CHECKED_POINTS = 101
"""Number of points at which the rate is computed before training, to find an invalid one early."""


@dataclass(frozen=True)
class LearningRatePolicy:
    """Learning-rate policy of a job at one global batch size.

    Attributes:
        section: The job's ``lr`` section. Rates can be computed when its durations are in epochs.
        global_batch_size: Samples per optimizer step, over all ranks; under strategies with
            ``lr_follows_rank``, those of one rank.
        total_epochs: Length of the whole job; if steps or samples limit it, a bound until ``ending_at``.
        train: The job's ``train`` section, for the growth of the batch.
        converted: The schedule with all durations in epochs; None: that of the section.
    """

    section: LearningRate
    global_batch_size: int
    total_epochs: float
    train: Train = field(default_factory=Train)
    converted: Schedule | None = None

    @property
    def peak_lr(self) -> float:
        """The base rate, scaled to the global batch; under AdaScale, the largest possible rate.

        >>> LearningRatePolicy(LearningRate(base_lr=0.1, reference_batch_size=256), 8192, 90).peak_lr
        3.2
        """
        return self.section.base_lr * self.scaled.rate

    @cached_property
    def scaled(self) -> Scaled:
        """Factors of the scaling rule at the full global batch."""
        return self._scaled_at(self.global_batch_size)

    @property
    def warmup_epochs(self) -> float:
        """Length of the warm-up, scaled by the rule."""
        return self.section.warmup.epochs * self.scaled.warmup

    @property
    def is_in_epochs(self) -> bool:
        """Whether all durations are in epochs; others are converted when training begins."""
        return all(each.unit == "epochs" for each in self.durations)

    @property
    def durations(self) -> list[Duration]:
        """All durations and positions of warm-up, schedule and growth of the batch."""
        growth = self.train.batch_warmup
        return [self.section.warmup, *self.schedule.durations, *([growth.length] if growth else [])]

    def in_epochs(self, convert: Callable[[Duration], Duration], train: Train) -> LearningRatePolicy:
        """Return the policy with all durations in epochs.

        A rule that lengthens the warm-up (legw) lengthens its epochs and samples: in steps, it is constant.

        Args:
            convert: Converts a position.
            train: The section ``train``, with a batch warm-up in epochs.
        """
        warmup = convert(self.section.warmup)
        if self.section.warmup.unit == "steps":
            warmup = Duration(warmup.epochs / self.scaled.warmup)
        section = self.section.model_copy(update={"warmup": warmup})
        schedule = self.schedule.in_epochs(convert, self.section.warmup)
        return replace(self, section=section, train=train, converted=schedule)

    def at(self, epochs: float, *, gain: float | None = None, plateau_factor: float = 1.0) -> float:
        """Return the rate of a step.

        Args:
            epochs: Epochs passed, including the fraction of the current epoch; under AdaScale, the
                scale-invariant progress.
            gain: The measured gain of AdaScale; None: the scaling rule determines the factor.
            plateau_factor: Product of the reductions of ``decay: plateau``.

        Raises:
            UserError: A rule or schedule of the user returns an invalid number.
        """
        factor = self._factor_at(epochs) if gain is None else gain
        peak, warmup = self.section.base_lr * factor, self.warmup_epochs
        if epochs < warmup:
            given = self.section.warmup_start_lr
            start = min(self.section.base_lr, peak) if given is None else given
            if given is not None and gain is not None:
                start *= gain  # AdaScale multiplies the whole schedule of the reference batch
            rate = start + (peak - start) * epochs / warmup
        else:
            rate = peak * self.schedule.at(Position(epochs, warmup, self.total_epochs))
        return rate * plateau_factor

    def ending_at(self, total_epochs: float) -> LearningRatePolicy:
        """Return the policy of a job that ends earlier."""
        return replace(self, total_epochs=total_epochs)

    def check(self) -> None:
        """Check the policy before training, if its durations are in epochs.

        Raises:
            UserError: The scaled warm-up is longer than the training or than the schedule permits, the batch
                warm-up begins above the global batch, or a rate is invalid.
        """
        batch_warmup = self.train.batch_warmup
        if batch_warmup is not None and batch_warmup.start > self.global_batch_size:
            raise UserError(
                f"train.batch_warmup.start {batch_warmup.start} is above the global batch of "
                f"{self.global_batch_size}, to which the batch grows",
                hint="use a smaller start, a larger train.global_batch_size, or leave train.batch_warmup out",
            )
        if not self.is_in_epochs:
            return  # checked when training begins
        if self.warmup_epochs > self.total_epochs:
            why = (
                f"scaling {self.section.scaling} makes the warm-up {self.scaled.warmup:g} times as long at a "
                f"global batch of {self.global_batch_size}: "
            )
            raise UserError(
                f"lr.warmup: {why if self.scaled.warmup != 1 else 'it has '}{self.warmup_epochs:g} epochs, "
                f"and train.epochs is {self.total_epochs:g}",
                hint="use fewer ranks, a shorter lr.warmup, more epochs, or another lr.scaling",
            )
        if self.schedule.begins and self.warmup_epochs > 0:
            position = Position(self.warmup_epochs, self.warmup_epochs, self.total_epochs)
            if self.schedule.at(position) < 1:
                raise UserError(
                    f"lr.decay: {self.section.decay} reduces the rate before the warm-up of "
                    f"{self.warmup_epochs:g} epochs ends",
                    hint=f"use a shorter warm-up, or a later {self.schedule.begins}",
                )
        for number in range(NUM_CHECKED_POINTS):
            self.at(self.total_epochs * number / (NUM_CHECKED_POINTS - 1))

    def _factor_at(self, epochs: float) -> float:
        if self.train.batch_warmup is None:
            return self.scaled.rate
        return self._scaled_at(batch_size_at(self.train, self.global_batch_size, epochs)).rate

    def _scaled_at(self, global_batch_size: int) -> Scaled:
        scaled = self._rule(global_batch_size / self.section.reference_batch_size)
        if not isinstance(scaled, Scaled):  # a rule of the user may return the factor of the rate
            scaled = Scaled(rate=valid(scaled, f"lr.scaling: {self.section.scaling}"))
        if scaled.follows_gain and ":" in self.section.scaling:
            raise UserError(
                f"lr.scaling: {self.section.scaling} follows a measured gain, which needs a registered rule",
                hint="register it as an entry point in the group horovod_train.scalings",
            )
        return scaled

    @cached_property
    def _rule(self) -> Callable[[float], Scaled | float]:
        # The optimizer of a user's own loop is not known.
        name = DEFAULT_SCALING if self.section.scaling == AUTO else self.section.scaling
        rule: Callable[[float], Scaled | float] = load_location(name, SCALINGS)
        return rule

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule after warm-up."""
        return self.converted or schedule_of(self.section)


def policy_of(job: Job, num_data_ranks: int) -> LearningRatePolicy:
    """Return the learning-rate policy of a job on a number of data-parallel ranks."""
    return LearningRatePolicy(job.lr, batch_size_of_lr(job, num_data_ranks), job.train.most_epochs, job.train)


@dataclass(frozen=True)
class EpochLength:
    """Length of an epoch whose steps all have the same batch.

    Attributes:
        num_steps: Optimizer steps; None: unknown.
        num_samples: Samples; None: unknown.

    >>> EpochLength(100, 3200).in_epochs(Duration(250, "steps"))
    Duration(amount=2.5, unit='epochs')
    """

    num_steps: float | None
    num_samples: int | None

    def in_epochs(self, duration: Duration) -> Duration:
        """Return a duration in epochs.

        Raises:
            UserError: The length is not known in its unit.
        """
        if duration.unit == "epochs":
            return duration
        length = self.num_steps if duration.unit == "steps" else self.num_samples
        if length is None:
            raise UserError(
                f"{duration}: the number of {duration.unit} of an epoch is not known here",
                hint="write it in epochs",
            )
        return Duration(duration.amount / length)


def policy_of_section(
    section: LearningRate, global_batch_size: int, total_epochs: float, length: EpochLength
) -> LearningRatePolicy:
    """Return a policy for a user's own loop, which has no measured inputs.

    Raises:
        UserError: The section uses AdaScale or ``decay: plateau``.
    """
    policy = LearningRatePolicy(section, global_batch_size, total_epochs)
    policy = policy.in_epochs(length.in_epochs, policy.train)
    if policy.scaled.follows_gain or policy.schedule.metric_name is not None:
        raise UserError(
            "adascale and decay: plateau depend on measurements of a job, which this loop does not have",
            hint="use another lr.scaling or lr.decay, or a job (docs/scaling.md)",
        )
    return policy


class ArgumentSchedules:
    """Values of an optimizer's arguments as functions of the progress.

    Args:
        schedules: Points (position, value), or the location of a function of the progress from 0 to 1, by
            name.
        total_epochs: Length of the whole job.
        convert: Converts a position to epochs.

    >>> points = [(Duration(0), 0.5), (Duration(5), 1.0)]
    >>> ArgumentSchedules({"momentum": points}, 10, lambda position: position).at(2.5)
    {'momentum': 0.75}
    """

    def __init__(
        self,
        schedules: Mapping[str, Any],
        total_epochs: float,
        convert: Callable[[Duration], Duration],
    ) -> None:
        self._curves = {
            name: _curve(name, given, total_epochs)
            if isinstance(given, str)
            else partial(interpolated, [(convert(position).epochs, value) for position, value in given])
            for name, given in schedules.items()
        }

    def at(self, epochs: float) -> dict[str, float]:
        """Return the values after a number of epochs, including the fraction of the current epoch.

        Raises:
            UserError: A function of the user returns an invalid number.
        """
        return {name: curve(epochs) for name, curve in self._curves.items()}


def _curve(name: str, given: str, total_epochs: float) -> Callable[[float], float]:
    curve = load_location(given, SCHEDULES)

    def at(epochs: float) -> float:
        progress = min(1.0, epochs / total_epochs)
        return valid(curve(progress), f"optimizer.schedules.{name}: {given}", progress)

    return at


BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 60
HEIGHT = 6


def chart(
    curve: Callable[[float], float], total_epochs: float, *, height: int = HEIGHT, end: str = ""
) -> list[str]:
    """Return a chart of a curve over the epochs of a training, as lines; the vertical axis begins at 0.

    Args:
        curve: Returns the value after a number of epochs.
        total_epochs: Length of the training.
        height: Number of lines, without that of the axis.
        end: Label of the end of the axis; empty: the length in epochs.

    >>> for line in chart(lambda epochs: epochs, 10, height=2): print(line.rstrip())
                9.917 |                                ▁▁▁▂▂▂▂▃▃▃▃▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇██
                    0 |  ▁▁▁▁▂▂▂▃▃▃▃▄▄▄▄▅▅▅▆▆▆▆▇▇▇▇████████████████████████████████
                      0                                                  10 epochs
    """
    values = [curve(total_epochs * (column + 0.5) / WIDTH) for column in range(WIDTH)]
    top = max(values) or 1.0
    lines = []
    for row in reversed(range(height)):
        filled = [min(max(value / top * height - row, 0.0), 1.0) for value in values]
        label = f"{top:.4g}" if row == height - 1 else "0" if row == 0 else ""
        lines.append(f"{label:>17} |" + "".join(BLOCKS[round(8 * part)] for part in filled))
    end = end or f"{total_epochs:g} epochs"
    return [*lines, " " * 18 + "0" + f"{end:>{WIDTH - 1}}"]


BETAS = ("betas", "beta_1", "beta_2", "b1", "b2", "beta1", "beta2")
ADAM_BETAS = (0.9, 0.999)
"""Default of PyTorch, Keras and Optax."""
EPSILONS = ("eps", "epsilon")
WEIGHT_DECAYS = ("weight_decay", "wd")
"""Names of arguments in PyTorch, Keras, Optax and MXNet."""


@dataclass(frozen=True)
class ArgumentScaling:
    """Factors of an optimizer's arguments at the global batch of a job.

    Attributes:
        rule: Name of the job's scaling rule.
        one_minus_beta: Factor of 1 - beta.
        epsilon: Factor of epsilon.
        weight_decay: Factor of the weight decay: k / (factor of the rate). An AdamW update averages weights
            over 1 / (rate x weight decay) steps; with this factor, that is the same number of epochs for each
            batch (Wang & Aitchison, arXiv:2405.13698).
    """

    rule: str = DEFAULT_SCALING
    one_minus_beta: float = 1.0
    epsilon: float = 1.0
    weight_decay: float = 1.0

    @classmethod
    def of(cls, job: Job, num_data_ranks: int) -> ArgumentScaling:
        """Return the factors of a job on a number of data-parallel ranks."""
        policy = policy_of(job, num_data_ranks)
        scaled, k = policy.scaled, policy.global_batch_size / job.lr.reference_batch_size
        return cls(
            job.lr.scaling,
            scaled.one_minus_beta,
            scaled.epsilon,
            k / scaled.rate if job.lr.scale_weight_decay else 1.0,
        )

    def scaled(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments, or settings of a parameter group, multiplied by the factors.

        Raises:
            UserError: A beta would not be positive.
        """
        found = dict(args)
        for name, value in args.items():
            if value is None:
                continue
            if name in BETAS and self.one_minus_beta != 1.0:
                is_pair = isinstance(value, tuple | list)
                found[name] = tuple(map(self._beta, value)) if is_pair else self._beta(value)
            elif name in EPSILONS:
                found[name] = value * self.epsilon
            elif name in WEIGHT_DECAYS:
                found[name] = value * self.weight_decay
        return found

    def _beta(self, beta: float) -> float:
        scaled = 1 - self.one_minus_beta * (1 - beta)
        if scaled < 1e-9:  # 1 - beta is rounded
            raise UserError(
                f"lr.scaling: {self.rule} requires (global batch / reference batch) x (1 - beta) < 1; it is "
                f"{self.one_minus_beta:g} x {1 - beta:g}",
                hint="use a smaller global batch, a larger beta in optimizer.args, or lr.scaling: sqrt",
            )
        return scaled

    def check(self, job: Job) -> None:
        """Check the arguments that are known before training: those of the job, or Adam's default betas.

        Raises:
            UserError: A beta would not be positive.
        """
        default = {"betas": ADAM_BETAS} if job.optimizer.name in {"adam", "adamw"} else {}
        args = job.optimizer.args
        self.scaled(args if set(BETAS) & args.keys() else {**default, **args})

    def arguments(self, factory: Any, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scaled arguments of an optimizer's class or function, including scaled defaults.

        Raises:
            UserError: The optimizer lacks an argument that the job scales.
        """
        names = [
            *(EPSILONS if self.epsilon != 1.0 else ()),
            *(BETAS if self.one_minus_beta != 1.0 else ()),
            *(WEIGHT_DECAYS if self.weight_decay != 1.0 else ()),
        ]
        if not names:
            return dict(args)
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(factory).parameters.items()
            if name in names and parameter.default is not inspect.Parameter.empty
        }
        for kind, reason in ((BETAS, f"lr.scaling: {self.rule}"), (WEIGHT_DECAYS, "lr.scale_weight_decay")):
            if set(kind) & set(names) and not set(kind) & {*defaults, *args}:
                raise UserError(
                    f"{reason}: the optimizer has none of the arguments {', '.join(kind)}",
                    hint="use an optimizer with such an argument, or leave the field out",
                )
        return {**args, **self.scaled({**defaults, **args})}
