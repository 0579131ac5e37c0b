"""Estimates of the memory that a rank needs under each strategy, from the sizes of a job.

    resident  weights, buffers and optimizer state, which are allocated between steps
    passes    resident + activations and gradients at the peak of forward and backward
    update    resident + gradients + temporary tensors at the peak of the optimizer's step
    peak      the larger of passes and update

Each strategy divides some of these sizes by the number of ranks that shard them, and adds its own copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from horovod_train.config.codecs import arguments_of
from horovod_train.config.schema import Job

TRACER_BYTES = 75 * 2**20
"""Additional memory of a process that has traced a model (``torch.fx`` imports SymPy)."""

DEEPSPEED_BYTES = 90 * 2**20
"""Additional memory of a process for DeepSpeed: its import, and its allocations and deallocations."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a job in one process, in bytes.

    Attributes:
        weights: All parameters.
        trained: Trained parameters; equals the size of their gradients.
        buffers: All buffers.
        optimizer: Optimizer state.
        activations: Other tensors at the peak of forward and backward of a micro-batch.
        gradients_by_then: Gradients at that peak.
        update: Temporary tensors at the peak of the optimizer's step.
        largest: Largest parameter.
        units: Parameters of each FSDP unit.
        process: A process without tensors.
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
class MemoryEstimate:
    """Memory that a rank needs, in bytes.

    Attributes:
        weights: Parameters and buffers.
        gradients: All gradients.
        optimizer: Optimizer state.
        peak: Peak of all tensors.
        process: Approximate peak of the process.
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
"""Strategies from fast to slow, by bytes sent and by overlap of communication with computation."""


def needs(sizes: Sizes, shared: Sizes | None, job: Job, num_ranks: int) -> dict[str, MemoryEstimate]:
    """Return the memory that a rank needs under each strategy, with the model sharded over all ranks.

    ``sizes`` are those of the job in one process, ``shared`` those of a tensor-parallel rank, if known.
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


def fastest_that_fits(found: dict[str, MemoryEstimate], limit_bytes: float) -> str | None:
    """Return the fastest strategy whose process memory is within the limit, or None."""
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
) -> MemoryEstimate:
    """Return the memory of a rank, given divisors of weights, gradients, optimizer state and activations.

    ``extra`` is additional memory in the passes, in bytes. With ``keeps_gradients``, gradients are stored in
    buckets, which stay allocated between steps.
    """
    whole = sizes.weights / weights + sizes.buffers
    state = sizes.optimizer / optimizer
    by_then = sizes.trained if keeps_gradients else sizes.gradients_by_then
    at_peak = whole + state + sizes.activations / passes + by_then / gradients + extra
    in_update = whole + state + sizes.trained / gradients + sizes.update / optimizer
    peak = max(at_peak, in_update)
    # Each process first creates the whole model, then shards it.
    return MemoryEstimate(
        whole, sizes.trained / gradients, state, peak, max(peak, sizes.weights) + sizes.process
    )


def _allreduce(sizes: Sizes, job: Job, num_ranks: int) -> MemoryEstimate:
    """Return the memory for ``allreduce``. Residuals of a codec stay allocated in all phases of a step."""
    need = _need(sizes, keeps_gradients=num_ranks > 1)
    codec = job.allreduce.codec
    declared = None if codec is None else arguments_of(codec.name)
    residuals = sizes.trained * (declared.residual_copies if declared else 0)
    return replace(need, peak=need.peak + residuals, process=need.process + residuals)


def _bucket(sizes: Sizes, job: Job) -> float:
    """Return the size of gradients in transit: one just computed, a bucket being filled, three being sent."""
    return min(5 * max(job.allreduce.bucket_size_mib * 2**20, sizes.largest), sizes.trained)


def _gathered(sizes: Sizes) -> float:
    """Return the maximum size of gathered parameters: those outside of units, and the two largest units."""
    return sizes.weights - sum(sizes.units) + sum(sorted(sizes.units)[-2:])


def _fsdp(sizes: Sizes, num_ranks: int, *, gathered: float) -> MemoryEstimate:
    largest = max([*sizes.units, sizes.weights - sum(sizes.units)])
    return _need(
        sizes,
        weights=num_ranks,
        gradients=num_ranks,
        optimizer=num_ranks,
        extra=(gathered + largest) if num_ranks > 1 else 0,
    )


def _deepspeed(sizes: Sizes, job: Job, num_ranks: int) -> MemoryEstimate:
    """Return the memory for ZeRO stage 3: as for fsdp, plus persistent gradients, which the update copies."""
    need = _fsdp(sizes, num_ranks, gathered=_gathered(sizes))
    gradients = sizes.trained / num_ranks
    resident = need.weights + need.optimizer + gradients
    in_passes = need.peak - sizes.gradients_by_then / num_ranks + gradients + _bucket(sizes, job)
    peak = max(in_passes, resident + gradients + sizes.update / num_ranks)
    return replace(need, peak=peak, process=max(peak, sizes.weights) + sizes.process + DEEPSPEED_BYTES)


def _pipeline(sizes: Sizes, job: Job, num_ranks: int) -> MemoryEstimate:
    """Return the memory for the first of approximately equal stages, because it stores most activations.

    The process traces a second, whole model before the first one is cut into stages.
    """
    stage = max([sizes.weights / num_ranks, sizes.weights - sum(sizes.units), *sizes.units])
    part = sizes.weights / stage
    under_way = min(num_ranks, job.train.accumulation_steps)
    need = _need(sizes, weights=part, gradients=part, optimizer=part, passes=num_ranks / under_way)
    process = max(need.peak, 2 * sizes.weights) + sizes.process + TRACER_BYTES
    return replace(need, process=process)
