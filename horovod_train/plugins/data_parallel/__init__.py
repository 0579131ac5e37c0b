"""Strategy ``data_parallel``: one process with several GPUs."""

from __future__ import annotations

from horovod_train.config.support import Refused, StrategySupport
from horovod_train.frameworks.torch.strategies import (
    NO_GRAPHS,
    NO_RANDOMNESS_BY_SAMPLE,
    no_compression,
    no_noise_scale,
)

SUPPORT = StrategySupport(
    f"{__name__}.strategy:DataParallel",
    refused=(
        NO_GRAPHS,
        *no_noise_scale("PyTorch sums the gradients of replicas during the backward pass"),
        NO_RANDOMNESS_BY_SAMPLE,
        *no_compression("a single process sends no gradients"),
        Refused("train.compile", "the model is replicated in each step", "leave it out"),
    ),
    is_verified=True,
)
