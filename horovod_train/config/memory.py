"""Estimates of the memory that a rank needs under each strategy, from the sizes of a job.

    resident  weights, buffers and optimizer state, which are allocated between steps
    passes    resident + activations and gradients at the peak of forward and backward
    update    resident + gradients + temporary tensors at the peak of the optimizer's step
    peak      the larger of passes and update

A strategy divides some of these sizes by the number of ranks that shard them, and adds copies of its own: its
row declares how (``StrategySupport.memory``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from horovod_train.config.support import strategies_with_support

if TYPE_CHECKING:
    from horovod_train.config.schema import Job


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

    @property
    def gathered(self) -> int:
        """Maximum size of gathered parameters: those outside of units, and the two largest units."""
        return self.weights - sum(self.units) + sum(sorted(self.units)[-2:])


@dataclass(frozen=True)
class JobSizes:
    """What the memory of a rank depends on.

    Attributes:
        job: The job.
        num_ranks: Number of ranks that share the model.
        whole: Sizes of the job in one process.
        of_tensor_rank: Sizes of a tensor-parallel rank; None: one rank, or its layers cannot be cut.
    """

    job: Job
    num_ranks: int
    whole: Sizes
    of_tensor_rank: Sizes | None = None

    @cached_property
    def bucket(self) -> float:
        """Gradients in transit: one just computed, a bucket being filled, three being sent, in bytes."""
        bucket_bytes = self.job.allreduce.bucket_size_mib * 2**20
        return min(5 * max(bucket_bytes, self.whole.largest), self.whole.trained)


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory that a rank needs, in bytes.

    Attributes:
        weights: Parameters and buffers.
        gradients: All gradients.
        optimizer: Optimizer state.
        peak: Peak of all tensors.
        process: Approximate peak of the process.
        speed_rank: Place among strategies from fast to slow, by bytes sent and by overlap of communication
            with computation: 0 (allreduce), 10 and 20 (zero), 30 and 40 (fsdp), 50 (deepspeed),
            60 (tensor_parallel), 70 (pipeline).
    """

    weights: float
    gradients: float
    optimizer: float
    peak: float
    process: float
    speed_rank: int


def estimate(
    sizes: Sizes,
    *,
    speed_rank: int,
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
    process = max(peak, sizes.weights) + sizes.process
    return MemoryEstimate(whole, sizes.trained / gradients, state, peak, process, speed_rank)


def needs(sizes: JobSizes) -> dict[str, MemoryEstimate]:
    """Return the memory that a rank needs under each strategy, with the model sharded over all ranks."""
    return dict(_needs(sizes))


def _needs(sizes: JobSizes) -> Iterator[tuple[str, MemoryEstimate]]:
    for name, support in strategies_with_support():
        variants: Mapping[str, MemoryEstimate] = support.memory(sizes) if support.memory else {}
        for variant, found in variants.items():
            yield f"{name} {variant}".strip(), found


def fastest_that_fits(found: Mapping[str, MemoryEstimate], limit_bytes: float) -> str | None:
    """Return the fastest strategy whose process memory is within the limit, or None."""
    fitting = [(each.speed_rank, name) for name, each in found.items() if each.process <= limit_bytes]
    return min(fitting)[1] if fitting else None
