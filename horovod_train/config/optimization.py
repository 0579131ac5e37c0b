"""Sections of the job description for the optimizer, its learning rate, evaluations and checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from horovod_train.config.fields import (
    Count,
    Duration,
    ImportPath,
    Interval,
    Name,
    Points,
    Section,
)
from horovod_train.registry import DEFAULT_SCALING, DEFAULT_SCHEDULE, SCALING_OF_ADAM

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
        return SCALING_OF_ADAM if DIVIDES_BY_RMS.search(name) else DEFAULT_SCALING


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


class LearningRate(Section):
    """Base learning rate, batch-size scaling and schedule (see docs/scaling.md)."""

    base_lr: Annotated[float, Field(gt=0, le=1e6)] = 0.01
    """Learning rate tuned for ``reference_batch_size``."""

    reference_batch_size: Count = 32
    """Global batch size for which ``base_lr`` was tuned."""

    scaling: ImportPath | Name = AUTO
    """Scaling rule of the rate with the global batch: linear, sqrt, none, legw, adam_sqrt, adascale, or an
    import path ``file.py:rule``. auto: sqrt for Adam and its relatives; linear for SGD and others,
    and in own loops. It must be set for optimizers without an established rule, such as Lion."""

    scale_weight_decay: bool = False
    """Scale the optimizer's ``weight_decay`` so that rate x weight decay x steps per epoch is constant."""

    momentum_correction: bool = False
    """Correct the momentum when the rate changes, for SGD of Keras and TensorFlow, whose momentum contains
    the rate; that of PyTorch and JAX does not contain it. Refused with MXNet."""

    warmup: Duration = Duration(0)
    """Length of the linear ramp from the base rate (or ``warmup_start_lr``)."""

    warmup_start_lr: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Initial rate of the ramp; null: the smaller of base and peak rate."""

    decay: ImportPath | Name = DEFAULT_SCHEDULE
    """Schedule after warm-up: constant, step, points, cosine, cosine_restarts, polynomial, inverse_sqrt, wsd,
    one_cycle, plateau, or a function ``file.py:curve`` of the progress from 0 to 1."""

    decay_args: dict[str, Any] = {}
    """Arguments of the schedule (docs/arguments.md), such as ``end_factor: 0.1``; those of a function are its
    keyword arguments."""


@dataclass(frozen=True)
class Scaled:
    """Factors by which settings of the reference batch are multiplied.

    Attributes:
        rate: Factor of the learning rate. If ``follows_gain``, the largest possible factor.
        warmup: Factor of the length of the warm-up, in epochs.
        one_minus_beta: Factor of 1 - beta, for the betas of Adam.
        epsilon: Factor of Adam's epsilon.
        follows_gain: The factor of the rate is the gain of AdaScale, which is measured in each step.
    """

    rate: float
    warmup: float = 1.0
    one_minus_beta: float = 1.0
    epsilon: float = 1.0
    follows_gain: bool = False


def as_list(value: object) -> object:
    """Return a single value as a list; null as an empty one."""
    return [] if value is None else value if isinstance(value, list) else [value]


class EarlyStopping(Section):
    """Stop training when an evaluation metric no longer improves."""

    metric: Annotated[str, StringConstraints(min_length=1)]
    """Name of an evaluation metric."""

    mode: Literal["min", "max"]
    """Whether smaller or larger is better."""

    patience: Count = 3
    """Number of evaluations without an improvement before all ranks stop."""

    min_delta: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Smallest change that counts as an improvement."""


class Evaluation(Section):
    """Interval and batch size of evaluations, and early stopping."""

    every: Interval = Duration(1)
    """Interval of evaluations; the end of training is always evaluated."""

    batch_size_per_rank: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Samples per rank and step; null: as in training."""

    early_stopping: EarlyStopping | None = None
    """Early stopping; null: train all epochs."""


class Best(Section):
    """Criterion of the best checkpoint."""

    metric: Annotated[str, StringConstraints(min_length=1)]
    """Name of an evaluation metric."""

    mode: Literal["min", "max"]
    """Whether smaller or larger is better."""


class Checkpoint(Section):
    """Interval and folder of checkpoints, and whether to resume."""

    dir: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Folder that all ranks can read (under sharded strategies, also write); null: ``checkpoints`` in the
    folder of the job."""

    every: Annotated[
        list[Interval], BeforeValidator(as_list, json_schema_input_type=Interval | list[Interval] | None)
    ] = [Duration(1)]
    """Intervals of checkpoints: a duration, or a list. null: only the end of training is saved, as always."""

    keep_last: Count = 3
    """Number of newest checkpoints to retain."""

    best: Best | None = None
    """Criterion of a best checkpoint, which is also saved and retained; null: none."""

    resume: Literal["auto", "never", "required"] = "auto"
    """auto: resume from the newest valid checkpoint, if any; required: fail if none; never: start over."""

    background: bool = True
    """Write checkpoints in the background."""
