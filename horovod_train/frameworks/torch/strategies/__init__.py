"""Reasons and arguments that several strategies share; strategies import no framework to declare them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import StringConstraints

from horovod_train.config.fields import Section
from horovod_train.config.support import Refused, follows_gain

Pattern = Annotated[str, StringConstraints(min_length=1)]
"""Pattern of names of modules, such as ``layers.*``."""

TensorStyle = Literal[
    "colwise",
    "rowwise",
    "colwise_gather",
    "embedding",
    "sequence",
    "sequence_begins",
    "sequence_ends",
    "colwise_sequence",
    "rowwise_sequence",
]


class TensorPlan(Section):
    """Argument of strategies that shard layers."""

    plan: dict[Pattern, TensorStyle] | None = None
    """Sharding style by module name pattern; null: the model's plan, or the plan of a known module type."""


NO_RANDOMNESS_BY_SAMPLE = Refused(
    "train.randomness",
    "random numbers by sample need a model that each rank calls with whole samples",
    "leave it out, or use allreduce, zero, ddp or fsdp",
)
NO_FP16 = Refused(
    "train.precision", "fp16: ranks would have unequal loss scales", "use bf16 or fp32", values=("fp16",)
)
NO_GRAPHS = Refused(
    "train.cuda_graph", "collectives of torch.distributed are not captured in CUDA graphs", "leave it out"
)
NO_CODECS = Refused(
    "allreduce.codec",
    "residuals (unsent parts of gradients) are stored only for whole weights",
    "leave it out",
)


def no_noise_scale(reason: str) -> tuple[Refused, ...]:
    """Return the fields that need the gradient of each rank before it is summed."""
    return (
        Refused("lr.scaling", f"adascale: {reason}", "use another rule", when=follows_gain),
        Refused("metrics.noise_scale_every_steps", reason, "leave it out, or use allreduce, zero or ddp"),
    )


def no_compression(reason: str) -> tuple[Refused, ...]:
    """Return the fields that compress gradients."""
    return (
        Refused("allreduce.wire_dtype", reason, "use fp32"),
        Refused("allreduce.codec", reason, "leave it out"),
    )


REFUSED_WITH_PYTORCH_SUMS = (*no_compression("PyTorch all-reduces uncompressed gradients"), NO_GRAPHS)
