"""Sections of the job description for the optimizer and its learning rate."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from horovod_train.config.duration import Duration, Interval
from horovod_train.config.fields import Count, Fraction, ImportPath, Name, Points, Section
from horovod_train.config.former import with_present_names

AUTO = "auto"
"""The scaling rule that suits the optimizer."""

DIVIDES_BY_RMS = re.compile(
    "adam|amsgrad|adagrad|adadelta|rmsprop|adafactor|adabelief|adahessian|adopt|adan|yogi|novograd|came$|lamb$"
)
"""Names of optimizers that divide a gradient by the root of its mean square."""

WITHOUT_RULE = re.compile(
    "lion|muon|schedule_?free|shampoo|soap|sophia|prodigy|dadapt|rprop|sign_?sgd|signum"
)
"""Names of optimizers for which no scaling rule is established."""


class Optimizer(Section):
    """Optimizer and its arguments. The section ``lr`` sets the learning rate."""

    name: ImportPath | Name = "sgd"
    """sgd, adam, adamw, lars, lamb, ``module:Class`` or ``file.py:Class``."""

    args: dict[str, Any] = {}
    """Keyword arguments of the optimizer, such as ``momentum: 0.9``."""

    schedules: dict[Name, Points | ImportPath] = {}
    """Schedules of arguments, such as ``momentum: [[0, 0.85], [5, 0.95]]``: points (position, value) with
    linear interpolation, or a function ``file.py:curve`` of the progress from 0 to 1. ``beta1`` and ``beta2``
    are the elements of ``betas``."""

    @property
    def scaling(self) -> str | None:
        """Scaling rule of the learning rate that suits the optimizer; None: none is established.

        The square root for Adam and its relatives (Malladi et al., arXiv:2205.10287), linear for SGD
        (Goyal et al., arXiv:1706.02677).

        >>> Optimizer(name="torch.optim:NAdam").scaling, Optimizer(name="pytorch_optimizer:Muon").scaling
        ('sqrt', None)
        """
        name = self.name.rpartition(":")[2].lower()
        if WITHOUT_RULE.search(name):
            return None
        return "sqrt" if DIVIDES_BY_RMS.search(name) else "linear"


class Ema(Section):
    """Exponential moving average of the weights, which is evaluated and can be exported."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Weight of the previous average in an update; the current weights have the weight 1 - decay."""

    scale_decay: bool = True
    """Use decay^k, with k = samples of the step / ``lr.reference_batch_size``, so that the average spans the
    same number of samples with each global batch. No effect with ``lr.scaling: none``, and in own loops."""

    every_steps: Count = 1
    """Interval of updates, in optimizer steps."""

    warmup: bool = False
    """Limit the decay of update n to (1 + n) / (10 + n), which reduces the influence of initial weights."""

    evaluate: bool = True
    """Evaluate the average; false: evaluate the trained weights."""


class Plateau(Section):
    """Reduction of the learning rate when an evaluation metric no longer improves."""

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


class LearningRate(Section):
    """Base learning rate, batch-size scaling and schedule (see docs/scaling.md)."""

    base_lr: Annotated[float, Field(gt=0, le=1e6)] = 0.01
    """Learning rate tuned for ``reference_batch_size``."""

    reference_batch_size: Count = 32
    """Global batch size for which ``base_lr`` was tuned."""

    scaling: ImportPath | Name = AUTO
    """Scaling rule of the rate with the global batch: linear, sqrt, none, legw, adam_sqrt, adascale, or an
    import path ``file.py:rule``. auto: sqrt for Adam and its relatives; otherwise, and in own loops, linear.
    """

    scale_weight_decay: bool = False
    """Scale the optimizer's ``weight_decay`` so that rate x weight decay x steps per epoch is constant."""

    momentum_correction: bool = False
    """Correct the momentum when the rate changes, for optimizers whose momentum contains the rate (SGD of
    Keras, TensorFlow and MXNet); that of PyTorch and JAX does not contain it."""

    warmup: Duration = Duration(0)
    """Length of the linear ramp from the base rate (or ``warmup_start_lr``)."""

    warmup_start_lr: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Initial rate of the ramp; null: the smaller of base and peak rate."""

    decay: ImportPath | Name = "constant"
    """Schedule after warm-up: constant, step, points, cosine, cosine_restarts, polynomial, inverse_sqrt, wsd,
    one_cycle, plateau, or a function ``file.py:curve`` of the progress from 0 to 1."""

    milestones: list[Interval] = []
    """decay: step. Positions at which the rate is multiplied by ``gamma``."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """decay: step. Factor at each milestone."""

    points: Points = []
    """decay: points. List of [position, factor of the peak rate], with linear interpolation."""

    power: Annotated[float, Field(gt=0, le=100)] = 1.0
    """decay: polynomial. Exponent."""

    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """decay: cosine, cosine_restarts, polynomial, wsd, one_cycle. Final rate as a fraction of the scaled
    rate."""

    first_cycle: Interval | None = None
    """decay: cosine_restarts. Length of the first cycle."""

    restart_factor: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """decay: cosine_restarts. Length of a cycle, relative to the previous one."""

    cooldown_fraction: Fraction = 0.2
    """decay: wsd. Fraction of the training in which the rate decreases, at its end."""

    cooldown_shape: Literal["linear", "sqrt"] = "sqrt"
    """decay: wsd. Shape of the decrease: linear, or 1 - sqrt."""

    rise_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """decay: one_cycle. Fraction of the training in which the rate increases."""

    start_factor: Annotated[float, Field(ge=0, le=1)] = 0.04
    """decay: one_cycle. Initial rate as a fraction of the scaled rate."""

    plateau: Plateau | None = None
    """decay: plateau. When, and by how much, the rate is reduced."""

    @model_validator(mode="before")
    @classmethod
    def _as_they_were_called(cls, values: object) -> object:
        """Rename fields of previous versions, which were numbers of epochs."""
        return with_present_names("lr", values)

    @property
    def durations(self) -> list[Duration]:
        """All durations and positions of the schedule."""
        positions = [position for position, _ in self.points]
        return [self.warmup, *self.milestones, *positions, *([self.first_cycle] if self.first_cycle else [])]

    def in_epochs(self, convert: Callable[[Duration], Duration]) -> LearningRate:
        """Return the section with all durations in epochs; ``convert`` converts a position."""
        warmup, cycle = convert(self.warmup), self.first_cycle
        if cycle is not None and cycle.unit == self.warmup.unit == "steps":  # it begins after the warm-up
            end = convert(Duration(self.warmup.amount + cycle.amount, "steps"))
            cycle = Duration(end.epochs - warmup.epochs)
        return self.model_copy(
            update={
                "warmup": warmup,
                "milestones": [convert(each) for each in self.milestones],
                "points": [(convert(position), value) for position, value in self.points],
                "first_cycle": convert(cycle) if cycle else None,
            }
        )
