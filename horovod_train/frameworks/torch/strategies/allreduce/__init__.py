"""Strategy ``allreduce``: data parallelism, whose gradients Horovod sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from horovod_train.config.support import JobSizes, MemoryEstimate, StrategySupport, codec_support, estimate


def memory(job: JobSizes) -> Mapping[str, MemoryEstimate]:
    """Return the memory of a rank. Residuals of a codec stay allocated in all phases of a step."""
    need = estimate(job.whole, keeps_gradients=job.num_ranks > 1, order=0)
    codec = job.job.allreduce.codec
    residuals = 0 if codec is None else job.whole.trained * codec_support(codec.name).residual_copies
    return {"": replace(need, peak=need.peak + residuals, process=need.process + residuals)}


SUPPORT = StrategySupport(f"{__name__}.strategy:allreduce", is_equal_to_accumulation=True, memory=memory)
