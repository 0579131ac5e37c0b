"""Strategy ``ddp``: PyTorch's DistributedDataParallel."""

from __future__ import annotations

from horovod_train.config.fields import Section
from horovod_train.config.support import StrategySupport
from horovod_train.frameworks.torch.strategies import REFUSED_WITH_PYTORCH_SUMS


class Arguments(Section):
    """Arguments of PyTorch's DistributedDataParallel."""

    find_unused_parameters: bool | None = None
    """Find parameters without a gradient in each step; null: if the first verified step has such parameters,
    and false without verification."""

    static_graph: bool = False
    """Assume that each step uses the same parameters in the same order."""


SUPPORT = StrategySupport(
    f"{__name__}.strategy:Ddp",
    Arguments,
    REFUSED_WITH_PYTORCH_SUMS,
    is_verified=True,
    is_equal_to_accumulation=True,
)
