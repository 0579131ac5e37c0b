"""Schedules: the rate after warm-up as a factor of the peak rate.

A schedule is a subclass of ``Schedule`` with a row in ``registry.SCHEDULES`` or an entry point in the group
``horovod_train.schedules``; its fields are the arguments in ``lr.decay_args``. ``lr.decay`` may also be a
function ``file.py:curve`` of the progress since the end of warm-up, from 0 to 1, which receives
``lr.decay_args`` as keyword arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, StringConstraints, ValidationError, field_validator

from horovod_train.config.fields import Duration, Fraction, Interval, Points, Section, increasing
from horovod_train.config.optimization import LearningRate
from horovod_train.config.problems import explain
from horovod_train.errors import Problem, UserError
from horovod_train.registry import SCHEDULES, load_location

ROUNDING = 1e-9
"""Relative error of sums of fractions of epochs."""

EndFactor = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Position:
    """Progress of a training.

    Attributes:
        epochs: Epochs passed, including the fraction of the current epoch.
        warmup_epochs: Length of the warm-up, at its scaled length.
        total_epochs: Length of the whole training.
    """

    epochs: float
    warmup_epochs: float
    total_epochs: float

    @property
    def progress(self) -> float:
        """Progress since the end of warm-up, from 0 to 1.

        >>> Position(6.0, 2.0, 10.0).progress, Position(12.0, 2.0, 10.0).progress
        (0.5, 1.0)
        """
        length = self.total_epochs - self.warmup_epochs
        return min(1.0, max(0.0, (self.epochs - self.warmup_epochs) / length)) if length > 0 else 1.0


@dataclass(frozen=True)
class PlateauState:
    """State of the reductions after evaluations, which checkpoints contain.

    Attributes:
        factor: Product of all reductions.
        best: Best value of the metric; None: no finite value so far.
        num_without_improvement: Evaluations since ``best`` or the last reduction.
        cooldown: Number of next evaluations that are not counted.
    """

    factor: float = 1.0
    best: float | None = None
    num_without_improvement: int = 0
    cooldown: int = 0


class Schedule(Section):
    """Base class of schedules. A schedule is a function of the position, and has no state.

    Attributes:
        begins: Noun for messages, such as "first milestone": the time until which the rate is constant, if
            arguments of the schedule determine it. It must not precede the end of warm-up.
    """

    begins: ClassVar[str] = ""

    def at(self, position: Position) -> float:
        """Return the factor of the peak rate at a position after warm-up; all durations are in epochs."""
        raise NotImplementedError

    @property
    def durations(self) -> Sequence[Duration]:
        """All fields that are durations or positions; ``in_epochs`` converts them."""
        return ()

    def in_epochs(self, convert: Callable[[Duration], Duration], warmup: Duration) -> Self:
        """Return the schedule with all durations in epochs.

        Args:
            convert: Returns a position, which is counted from the start of training, in epochs. A length that
                begins elsewhere is ``convert(begin + length) - convert(begin)``.
            warmup: Length of the warm-up, at the end of which some lengths begin, in the unit of the job.
        """
        del convert, warmup
        return self

    def problems(self, warmup: Duration) -> Iterator[Problem]:
        """Yield what does not fit the warm-up of a job."""
        del warmup
        yield from ()

    @property
    def metric_name(self) -> str | None:
        """Name of the evaluation metric after which the rate is reduced; None: there is none."""
        return None

    def after_evaluation(self, state: PlateauState, value: float) -> PlateauState:
        """Return the state after an evaluation with this value of the metric."""
        del value
        return state


class Constant(Schedule):
    """Constant rate."""

    def at(self, position: Position) -> float:
        del position
        return 1.0


class Step(Schedule):
    """The rate is multiplied by ``gamma`` at each milestone."""

    begins: ClassVar[str] = "first milestone"

    milestones: Annotated[list[Interval], Field(min_length=1)]
    """Positions at which the rate is multiplied by ``gamma``, such as [30, 60]."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Factor at each milestone."""

    @field_validator("milestones")
    @classmethod
    def _increase(cls, milestones: list[Duration]) -> list[Duration]:
        increasing(milestones, strictly=True)
        return milestones

    def at(self, position: Position) -> float:
        """Return gamma ** (number of milestones passed).

        >>> Step(milestones=[30, 60], gamma=0.5).at(Position(60, 5, 90))
        0.25
        """
        passed = (has_passed(milestone.epochs, position.epochs) for milestone in self.milestones)
        return float(self.gamma ** sum(passed))

    @property
    def durations(self) -> Sequence[Duration]:
        return self.milestones

    def in_epochs(self, convert: Callable[[Duration], Duration], warmup: Duration) -> Self:
        del warmup
        return self.model_copy(update={"milestones": list(map(convert, self.milestones))})


class PiecewiseLinear(Schedule):
    """A list of [position, factor], with linear interpolation."""

    points: Annotated[Points, Field(min_length=1)]
    """List of [position, factor of the peak rate], such as [[0, 1.0], [30, 0.1]]."""

    @field_validator("points")
    @classmethod
    def _increase(cls, points: list[tuple[Duration, float]]) -> list[tuple[Duration, float]]:
        increasing([position for position, _ in points])
        return points

    def at(self, position: Position) -> float:
        """Return the factor between the two nearest points.

        >>> PiecewiseLinear(points=[[10, 1.0], [20, 0.0]]).at(Position(15, 0, 30))
        0.5
        """
        return interpolated([(at.epochs, value) for at, value in self.points], position.epochs)

    @property
    def durations(self) -> Sequence[Duration]:
        return [position for position, _ in self.points]

    def in_epochs(self, convert: Callable[[Duration], Duration], warmup: Duration) -> Self:
        del warmup
        return self.model_copy(update={"points": [(convert(at), value) for at, value in self.points]})


class Cosine(Schedule):
    """Half a wave from the peak rate to ``end_factor`` at the end of training.

    Source: Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983,
    without restarts.
    """

    end_factor: EndFactor = 0.0
    """Final rate as a fraction of the peak rate."""

    def at(self, position: Position) -> float:
        """Return f + (1 - f) (1 + cos(pi t)) / 2, with f = end_factor and the progress t.

        >>> Cosine(end_factor=0.5).at(Position(5, 0, 10))
        0.75
        """
        return half_wave(position.progress, self.end_factor)


class CosineRestarts(Schedule):
    """Half waves, each ``restart_factor`` times as long as the previous one.

    Source: Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983.
    """

    first_cycle: Interval
    """Length of the first cycle, such as 10 epochs; it begins at the end of warm-up."""

    restart_factor: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Length of a cycle, relative to the previous one."""

    end_factor: EndFactor = 0.0
    """Final rate of a cycle as a fraction of the peak rate."""

    def at(self, position: Position) -> float:
        """Return the cosine curve of the current cycle.

        >>> schedule = CosineRestarts(first_cycle=2, restart_factor=2)
        >>> [round(schedule.at(Position(epochs, 0, 6)), 3) for epochs in (0, 1, 2, 4)]
        [1.0, 0.5, 1.0, 0.5]
        """
        length = self.first_cycle.epochs
        at = max(0.0, position.epochs - position.warmup_epochs)
        if self.restart_factor == 1:
            at -= math.floor(at / length + ROUNDING) * length
        while at >= length * (1 - ROUNDING):
            at -= length
            length *= self.restart_factor
        return half_wave(max(0.0, at / length), self.end_factor)

    @property
    def durations(self) -> Sequence[Duration]:
        return [self.first_cycle]

    def in_epochs(self, convert: Callable[[Duration], Duration], warmup: Duration) -> Self:
        cycle = self.first_cycle
        if cycle.unit == warmup.unit == "steps":  # a position in steps is converted, and not a length
            end = convert(Duration(warmup.amount + cycle.amount, "steps"))
            cycle = Duration(end.epochs - convert(warmup).epochs)
        return self.model_copy(update={"first_cycle": convert(cycle)})


class Polynomial(Schedule):
    """From the peak rate to ``end_factor`` at the end of training; with power 1, a line."""

    power: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Exponent."""

    end_factor: EndFactor = 0.0
    """Final rate as a fraction of the peak rate."""

    def at(self, position: Position) -> float:
        """Return f + (1 - f) (1 - t) ** power, with f = end_factor and the progress t.

        >>> Polynomial(power=2.0).at(Position(5, 0, 10))
        0.25
        """
        return float(self.end_factor + (1 - self.end_factor) * (1 - position.progress) ** self.power)


class InverseSqrt(Schedule):
    """The rate falls as 1 / sqrt(epochs) from the end of warm-up, whose length is the time scale.

    Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, section 5.3.
    """

    def at(self, position: Position) -> float:
        """Return sqrt(w / e), with the length w of warm-up and the epochs e passed.

        >>> InverseSqrt().at(Position(8, 2, 10))
        0.5
        """
        return min(1.0, math.sqrt(position.warmup_epochs / position.epochs)) if position.epochs else 1.0

    def problems(self, warmup: Duration) -> Iterator[Problem]:
        if warmup.amount == 0:
            message = "decay: inverse_sqrt needs a warm-up, whose length is its time scale"
            yield Problem("lr.warmup", "", message, "such as 5 epochs")


class WarmupStableDecay(Schedule):
    """The peak rate, and a decrease in the last ``cooldown_fraction`` of training (WSD).

    Sources: Hu et al., "MiniCPM", arXiv:2404.06395; the shape 1 - sqrt: Haegele et al., "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations", arXiv:2405.18392.
    """

    begins: ClassVar[str] = "cooldown (a smaller lr.decay_args.cooldown_fraction)"

    cooldown_fraction: Fraction = 0.2
    """Fraction of the training in which the rate decreases, at its end."""

    cooldown_shape: Literal["linear", "sqrt"] = "sqrt"
    """Shape of the decrease: linear, or 1 - sqrt."""

    end_factor: EndFactor = 0.0
    """Final rate as a fraction of the peak rate."""

    def at(self, position: Position) -> float:
        """Return 1, or f + (1 - f) (1 - s(x)) in the decrease, with its progress x and s(x) = x or sqrt(x).

        >>> schedule = WarmupStableDecay(cooldown_fraction=0.5, cooldown_shape="linear")
        >>> [schedule.at(Position(epochs, 0, 8)) for epochs in (2, 4, 6, 8)]
        [1.0, 1.0, 0.5, 0.0]
        """
        length = self.cooldown_fraction * position.total_epochs
        x = min(1.0, max(0.0, (position.epochs - (position.total_epochs - length)) / length))
        shape = x if self.cooldown_shape == "linear" else math.sqrt(x)
        return self.end_factor + (1 - self.end_factor) * (1 - shape)


class OneCycle(Schedule):
    """The rate rises from ``start_factor`` to the peak, and falls to ``end_factor``, as half waves.

    Source: Smith & Topin, "Super-Convergence", arXiv:1708.07120, with the cosine shape of PyTorch's
    OneCycleLR.
    """

    rise_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Fraction of the training in which the rate increases."""

    start_factor: Annotated[float, Field(ge=0, le=1)] = 0.04
    """Initial rate as a fraction of the peak rate."""

    end_factor: EndFactor = 0.0
    """Final rate as a fraction of the peak rate."""

    def at(self, position: Position) -> float:
        """Return the factor; the cycle is the whole training, so that it has no separate warm-up.

        >>> schedule = OneCycle(rise_fraction=0.5, start_factor=0.5)
        >>> [round(schedule.at(Position(epochs, 0, 8)), 3) for epochs in (0, 2, 4, 6, 8)]
        [0.5, 0.75, 1.0, 0.5, 0.0]
        """
        t, rise = position.progress, self.rise_fraction
        if t < rise:
            return half_wave(1 - t / rise, self.start_factor)
        return half_wave((t - rise) / (1 - rise), self.end_factor)

    def problems(self, warmup: Duration) -> Iterator[Problem]:
        if warmup.amount:
            message = "decay: one_cycle contains the rise of the rate"
            yield Problem("lr.warmup", str(warmup), message, "leave it out; set lr.decay_args.rise_fraction")


class Plateau(Schedule):
    """The rate is reduced when an evaluation metric no longer improves.

    Metrics are equal on all ranks, so all ranks reduce the rate after the same evaluation. The rules are
    those of PyTorch's ``ReduceLROnPlateau`` with an absolute threshold.
    """

    metric: Annotated[str, StringConstraints(min_length=1)]
    """Name of an evaluation metric."""

    mode: Literal["min", "max"]
    """Whether smaller or larger is better."""

    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor by which the rate is multiplied."""

    patience: Annotated[int, Field(ge=0, le=2**53)] = 2
    """Number of evaluations without an improvement that do not reduce the rate; the next one does."""

    min_delta: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Smallest change that counts as an improvement."""

    cooldown: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Number of evaluations after a reduction that are not counted."""

    min_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Lower limit of the product of all reductions."""

    def at(self, position: Position) -> float:
        """Return 1: the factor of a training without reductions, which are part of the job's progress."""
        del position
        return 1.0

    @property
    def metric_name(self) -> str | None:
        """Name of the evaluation metric after which the rate is reduced."""
        return self.metric

    def after_evaluation(self, state: PlateauState, value: float) -> PlateauState:
        """Return the state after an evaluation with this value of the metric.

        >>> schedule = Plateau(metric="loss", mode="min", factor=0.5, patience=1)
        >>> state, factors = PlateauState(), []
        >>> for value in (1.0, 0.9, 0.9, 0.95, 0.8):
        ...     state = schedule.after_evaluation(state, value)
        ...     factors.append(state.factor)
        >>> factors
        [1.0, 1.0, 1.0, 0.5, 0.5]
        """
        sign = 1 if self.mode == "max" else -1
        is_better = math.isfinite(value) and (
            state.best is None or sign * value > sign * state.best + self.min_delta
        )
        best = value if is_better else state.best
        num_bad = 0 if is_better else state.num_without_improvement + 1
        cooldown = state.cooldown
        if cooldown > 0:
            cooldown, num_bad = cooldown - 1, 0
        if num_bad <= self.patience:
            return replace(state, best=best, num_without_improvement=num_bad, cooldown=cooldown)
        return PlateauState(max(state.factor * self.factor, self.min_factor), best, 0, self.cooldown)


class Curve(Schedule):
    """A user's function of the progress since the end of warm-up."""

    location: str
    """``file.py:name`` or ``module:name``."""

    args: dict[str, object]
    """Keyword arguments of the function."""

    _curve: Callable[..., object] = PrivateAttr()

    def model_post_init(self, context: object) -> None:
        """Import the function."""
        del context
        self._curve = load_location(self.location, SCHEDULES)

    def at(self, position: Position) -> float:
        """Return what the function returns for the progress.

        Raises:
            UserError: It returns something else than a finite number that is at least 0.
        """
        try:
            found = self._curve(position.progress, **self.args)
        except TypeError as error:
            if not self.args:
                raise
            hint = "lr.decay_args must fit the arguments of the function"
            raise UserError(f"lr.decay: {self.location}: {error}", hint=hint) from error
        return valid(found, f"lr.decay: {self.location}", position.progress)


def schedule_of(section: LearningRate) -> Schedule:
    """Return the schedule of a section ``lr``.

    Raises:
        UserError: It is unknown, cannot be imported, or does not take its arguments.
    """
    found = load_location(section.decay, SCHEDULES)
    if not (isinstance(found, type) and issubclass(found, Schedule)):
        return Curve(location=section.decay, args=section.decay_args)
    try:
        return found.model_validate(section.decay_args)
    except ValidationError as error:
        problems = "; ".join(f"{each.path} {each.message}" for each in explain(error, found))
        raise UserError(f"lr.decay_args: {problems}", hint=f"of decay: {section.decay}") from error


def has_passed(position: float, epochs: float) -> bool:
    """Return whether a position has passed, also if rounding makes it a little later.

    >>> has_passed(5 / 3, 1 + 2 / 3)
    True
    """
    return position <= epochs * (1 + ROUNDING)


def interpolated(points: Sequence[Sequence[float]], epochs: float) -> float:
    """Return the value of a piecewise linear curve, which is constant before and after its points.

    >>> [interpolated([[0, 1.0], [10, 0.5], [10, 0.1]], epochs) for epochs in (-1, 5, 10, 11)]
    [1.0, 0.75, 0.1, 0.1]
    """
    before = [point for point in points if has_passed(point[0], epochs)]
    after = points[len(before) :]
    if not before or not after:
        return float(before[-1][1] if before else after[0][1])
    (start, low), (end, high) = before[-1], after[0]
    return float(low + (high - low) * (epochs - start) / (end - start))


def half_wave(t: float, end: float) -> float:
    """Return the cosine curve from 1 at t = 0 to ``end`` at t = 1."""
    return end + (1 - end) * (1 + math.cos(math.pi * t)) / 2


def valid(number: object, source: str, progress: float | None = None) -> float:
    """Return a number that a user's function has returned; raise UserError unless it is finite and >= 0."""
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not is_number or not 0 <= float(number) < math.inf:  # type: ignore[arg-type]
        at = "" if progress is None else f" at progress {progress:g}"
        raise UserError(f"{source} returns {number!r}{at}", hint="return a finite number that is at least 0")
    return float(number)  # type: ignore[arg-type]
