"""What each strategy offers: its arguments, and what of the job description it cannot honour.

The strategies themselves are PyTorch's (``frameworks/torch/strategies/``); here is what can be known, and
refused, before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from horovod_train.config.fields import Count, Section
from horovod_train.config.support import Refused


class NoArguments(Section):
    """It has none."""


class LocalSgdArguments(Section):
    """Ranks train by themselves, and average now and then."""

    every_steps: Count
    """So many steps are made between two means."""


class ZeroArguments(Section):
    """Each rank updates a part of the weights, and has the optimizer's state of that part alone."""

    stage: Literal[1, 2] = 2
    """1: gradients of all weights are kept while micro-batches add up; 2: those of the rank's own part."""


@dataclass(frozen=True)
class StrategySupport:
    """One strategy.

    Attributes:
        arguments: What ``strategy.args`` may hold.
        refused: What it cannot honour.
    """

    arguments: type[Section] = NoArguments
    refused: tuple[Refused, ...] = ()


NO_LOSS_SCALE = "each rank would have a loss scale of its own"

STRATEGY_SUPPORT: Mapping[str, StrategySupport] = {
    "allreduce": StrategySupport(),
    "local_sgd": StrategySupport(
        LocalSgdArguments,
        (
            Refused("train.precision", NO_LOSS_SCALE, "use bf16 or fp32", values=("fp16",)),
            Refused("allreduce.wire_dtype", "it would round the weights themselves", "use fp32"),
            Refused("allreduce.codec", "it sends no gradients", "leave it out"),
        ),
    ),
    "zero": StrategySupport(
        ZeroArguments,
        (
            Refused("train.precision", NO_LOSS_SCALE, "use bf16 or fp32", values=("fp16",)),
            Refused("allreduce.wire_dtype", "its sums are reduce-scattered as they are", "use fp32"),
            Refused("allreduce.codec", "its sums are reduce-scattered as they are", "leave it out"),
            Refused("train.channels_last", "a rank's part is kept in the order of memory", "leave it out"),
            Refused("train.cuda_graph", "a graph would keep all gradients", "leave it out"),
        ),
    ),
}
