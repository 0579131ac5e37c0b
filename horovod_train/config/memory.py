"""How much memory a rank needs under each strategy, as arithmetic on the sizes of a job.

    stays   what is there between steps: weights, buffers, the optimizer's state
    passes  stays + activations and what else forward and backward have at their peak, with gradients by then
    update  stays + gradients + what the optimizer's step has at its peak
    peak    the larger of the two

Each strategy divides some of it by the number of ranks that share it, and adds its own copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from horovod_train.config.codecs import arguments_of
from horovod_train.config.schema import Job

TRACER_BYTES = 75 * 2**20
"""What a process takes that has traced a model (``torch.fx`` imports SymPy)."""

DEEPSPEED_BYTES = 90 * 2**20
"""What a process takes that has imported DeepSpeed, and allocates and frees as it does."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a job in one process, in bytes.

    Attributes:
        weights: Of all parameters.
        trained: Of those that are trained, as of their gradients.
        buffers: Of all buffers.
        optimizer: State of the optimizer.
        activations: What forward and backward of a micro-batch have at their peak, besides all of this.
        gradients_by_then: Gradients that are there at that peak.
        update: What the optimizer's step has at its peak, besides all of this.
        largest: Of the parameters.
        units: Parameters of each unit that is gathered as one.
        process: What a process takes with nothing in it.
    """

    weights: int
    trained: int
    buffers: int
    optimizer: int
    activations: int
    gradients_by_then: int
    update: int
    largest: int
    units: Sequence[int]
    process: int


@dataclass(frozen=True)
class Need:
    """What a rank needs, in bytes.

    Attributes:
        weights: Parameters and buffers.
        gradients: When all are there.
        optimizer: State, and copies that stay.
        peak: Of all tensors.
        process: Of the whole process, about.
    """

    weights: float
    gradients: float
    optimizer: float
    peak: float
    process: float


BY_SPEED = (
    "allreduce",
    "zero 1",
    "zero",
    "fsdp without resharding",
    "fsdp",
    "deepspeed",
    "tensor_parallel",
    "pipeline",
)
"""From the one that sends least, or hides most of what it sends."""


def needs(sizes: Sizes, shared: Sizes | None, job: Job, num_ranks: int) -> dict[str, Need]:
    """Return what a rank needs under each strategy that shares the model among all ranks.

    Args:
        sizes: Of the job in one process.
        shared: On ranks that share each layer; None: unknown.
        job: The job.
        num_ranks: How many share the model.
    """
    found = {
        "allreduce": _allreduce(sizes, job, num_ranks),
        "zero": _need(sizes, optimizer=num_ranks, gradients=num_ranks, extra=_bucket(sizes, job)),
        "fsdp without resharding": _fsdp(sizes, num_ranks, gathered=sizes.weights),
        "fsdp": _fsdp(sizes, num_ranks, gathered=_gathered(sizes)),
        "deepspeed": _deepspeed(sizes, job, num_ranks),
        "pipeline": _pipeline(sizes, job, num_ranks),
    }
    if job.train.accumulation_steps > 1:  # otherwise gradients are reduced as soon as they are computed
        found["zero 1"] = _need(sizes, optimizer=num_ranks, keeps_gradients=True)
    if shared is not None:
        found["tensor_parallel"] = _need(shared)
    return found


def fastest_that_fits(found: dict[str, Need], limit_bytes: float) -> str | None:
    """Return the first strategy, in the order of their speed, whose process fits; None: none does."""
    fitting = [name for name in BY_SPEED if name in found and found[name].process <= limit_bytes]
    return fitting[0] if fitting else None


def _need(
    sizes: Sizes,
    *,
    weights: float = 1,
    gradients: float = 1,
    optimizer: float = 1,
    passes: float = 1,
    extra: float = 0,
    keeps_gradients: bool = False,
) -> Need:
    """Return a need, each part of which is divided by so many ranks.

    Args:
        sizes: Of the job.
        weights: By how much weights are divided.
        gradients: By how much gradients are.
        optimizer: By how much the optimizer's state is.
        passes: By how much activations are.
        extra: What is there besides in the passes, in bytes.
        keeps_gradients: Their memory stays between steps: they lie in the buckets that are sent.
    """
    whole = sizes.weights / weights + sizes.buffers
    state = sizes.optimizer / optimizer
    by_then = sizes.trained if keeps_gradients else sizes.gradients_by_then
    at_peak = whole + state + sizes.activations / passes + by_then / gradients + extra
    in_update = whole + state + sizes.trained / gradients + sizes.update / optimizer
    peak = max(at_peak, in_update)
    # A model is made whole, and then shared.
    return Need(whole, sizes.trained / gradients, state, peak, max(peak, sizes.weights) + sizes.process)


def _allreduce(sizes: Sizes, job: Job, num_ranks: int) -> Need:
    """Return the need of ``allreduce``; residuals of a codec are there in each phase of a step."""
    need = _need(sizes, keeps_gradients=num_ranks > 1)
    codec = job.allreduce.codec
    declared = None if codec is None else arguments_of(codec.name)
    residuals = sizes.trained * (declared.residual_copies if declared else 0)
    return replace(need, peak=need.peak + residuals, process=need.process + residuals)


def _bucket(sizes: Sizes, job: Job) -> float:
    """Return what gradients take on their way: one just made, a bucket that fills, three that are sent."""
    return min(5 * max(job.allreduce.bucket_size_mib * 2**20, sizes.largest), sizes.trained)


def _gathered(sizes: Sizes) -> float:
    """Return what is gathered at once: the rest of the model, and two units."""
    return sizes.weights - sum(sizes.units) + sum(sorted(sizes.units)[-2:])


def _fsdp(sizes: Sizes, num_ranks: int, *, gathered: float) -> Need:
    largest = max([*sizes.units, sizes.weights - sum(sizes.units)])
    return _need(
        sizes,
        weights=num_ranks,
        gradients=num_ranks,
        optimizer=num_ranks,
        extra=(gathered + largest) if num_ranks > 1 else 0,
    )


def _deepspeed(sizes: Sizes, job: Job, num_ranks: int) -> Need:
    """Return the need of stage 3: as fsdp, and gradients stay, of which the update has a copy."""
    need = _fsdp(sizes, num_ranks, gathered=_gathered(sizes))
    gradients = sizes.trained / num_ranks
    resident = need.weights + need.optimizer + gradients
    in_passes = need.peak - sizes.gradients_by_then / num_ranks + gradients + _bucket(sizes, job)
    peak = max(in_passes, resident + gradients + sizes.update / num_ranks)
    return replace(need, peak=peak, process=max(peak, sizes.weights) + sizes.process + DEEPSPEED_BYTES)


def _pipeline(sizes: Sizes, job: Job, num_ranks: int) -> Need:
    """Return the need of the first stage, which keeps most activations, with stages that are about even."""
    stage = max([sizes.weights / num_ranks, sizes.weights - sum(sizes.units), *sizes.units])
    part = sizes.weights / stage
    under_way = min(num_ranks, job.train.accumulation_steps)
    need = _need(sizes, weights=part, gradients=part, optimizer=part, passes=num_ranks / under_way)
    return replace(need, process=need.process + TRACER_BYTES)
