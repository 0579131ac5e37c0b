"""Strategy ``zero``: each rank updates a part of the weights, and stores its optimizer state only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from horovod_train.config.fields import Section
from horovod_train.config.support import JobSizes, MemoryEstimate, Refused, StrategySupport, estimate
from horovod_train.frameworks.torch.strategies import NO_FP16, no_compression


class Arguments(Section):
    """Arguments of ZeRO: each rank updates a part of the weights, and stores its optimizer state only."""

    stage: Literal[1, 2] = 2
    """1: while micro-batches accumulate, ranks store all gradients; 2: those of their part only."""


def memory(job: JobSizes) -> Mapping[str, MemoryEstimate]:
    """Return the memory of a rank in stage 2 and, if micro-batches accumulate, in stage 1."""
    parts = job.num_ranks
    found = {
        "": estimate(job.whole, optimizer_shards=parts, gradient_shards=parts, extra=job.bucket, order=20)
    }
    if job.job.train.accumulation_steps > 1:  # otherwise gradients are reduced as soon as they are computed
        found["1"] = estimate(job.whole, optimizer_shards=parts, keeps_gradients=True, order=10)
    return found


SUPPORT = StrategySupport(
    f"{__name__}.strategy:Zero",
    Arguments,
    (
        NO_FP16,
        *no_compression("gradients are reduce-scattered uncompressed"),
        Refused("train.channels_last", "shards are contiguous", "leave it out"),
        Refused("train.cuda_graph", "a CUDA graph keeps all gradients allocated", "leave it out"),
    ),
    is_verified=True,
    saves_memory=True,
    is_equal_to_accumulation=True,
    memory=memory,
)
