"""Strategy ``adasum``: ranks combine their updates by Adasum."""

from __future__ import annotations

from horovod_train.config.support import Refused, StrategySupport
from horovod_train.frameworks.torch.strategies import (
    NO_FP16,
    NO_RANDOMNESS_BY_SAMPLE,
    no_compression,
    no_noise_scale,
)

SUPPORT = StrategySupport(
    f"{__name__}.strategy:Adasum",
    refused=(
        NO_FP16,
        *no_compression("updates are combined uncompressed"),
        Refused("train.cuda_graph", "ranks exchange their losses in each step", "leave it out"),
        *no_noise_scale("ranks combine updates, not gradients"),
        NO_RANDOMNESS_BY_SAMPLE,
    ),
    lr_follows_rank=True,
)
