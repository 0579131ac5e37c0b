"""Strategy ``local_sgd``: ranks train independently, and average their weights periodically."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from horovod_train.config.fields import Count, Section
from horovod_train.config.support import Refused, StrategySupport
from horovod_train.frameworks.torch.strategies import NO_FP16, NO_RANDOMNESS_BY_SAMPLE, no_noise_scale


class OuterArguments(Section):
    """Outer optimizer (SGD) of local SGD. Its gradient is the update of the weights averaged over ranks."""

    lr: Annotated[float, Field(gt=0)] = 0.7
    """Learning rate; 1 without momentum equals averaging."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum."""

    nesterov: bool = True
    """Use Nesterov momentum."""


class Arguments(Section):
    """Arguments of local SGD: ranks train independently, and average their weights periodically."""

    every_steps: Count
    """Interval of averaging, in steps."""

    allreduce_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps at the start that all-reduce gradients, before ranks train independently."""

    outer: OuterArguments | None = None
    """Outer optimizer; null: weights are averaged; {}: the outer optimizer of DiLoCo."""


SUPPORT = StrategySupport(
    f"{__name__}.strategy:LocalSgd",
    Arguments,
    (
        NO_FP16,
        Refused("allreduce.wire_dtype", "it would round the weights", "use fp32"),
        Refused("allreduce.codec", "it sends no gradients but those of its first steps", "leave it out"),
        *no_noise_scale("ranks do not sum gradients in each step"),
        NO_RANDOMNESS_BY_SAMPLE,
    ),
)
