"""Strategy ``parameter_server``: asynchronous training with parameter servers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from horovod_train.config.fields import Count, Section
from horovod_train.config.support import Refused, StrategySupport
from horovod_train.frameworks.torch.strategies import (
    NO_FP16,
    NO_RANDOMNESS_BY_SAMPLE,
    no_compression,
    no_noise_scale,
)


class Arguments(Section):
    """Arguments of asynchronous training: ranks send gradients to servers that store parts of the weights."""

    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 4
    """Maximum number of steps that a rank is ahead of the slowest."""

    sync_every_steps: Count = 100
    """Interval in steps at which all gradients are waited for, so that weights can be saved and evaluated."""


SUPPORT = StrategySupport(
    f"{__name__}.strategy:ParameterServer",
    Arguments,
    (
        NO_FP16,
        Refused("health.non_finite", "ranks do not synchronize in each step", "use stop", values=("skip",)),
        *no_compression("gradients are sent uncompressed"),
        Refused("train.cuda_graph", "gradients are sent by the host", "leave it out"),
        *no_noise_scale("ranks do not synchronize in each step"),
        NO_RANDOMNESS_BY_SAMPLE,
        Refused("optimizer.schedules", "servers update the weights", "leave it out"),
    ),
    lr_follows_rank=True,
    requires_mpi=True,
)
