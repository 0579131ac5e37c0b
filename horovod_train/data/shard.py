"""Who reads which sample: arithmetic on (samples, seed, epoch, cursor, rank, size), nothing else.

An epoch is one order of all samples (``epoch_order``), the same on every rank. A cursor says how
many of them have been used by the ranks together. One optimizer step takes the next
``global batch`` samples of the order; what is left at the end makes one shorter step. Ranks split
each step's samples in consecutive pieces of (almost) equal length, so

* every sample is used exactly once per epoch, for any number of ranks;
* n ranks with batch b take the same samples per step as one rank with batch n * b;
* the cursor alone, with any number of ranks, says where an interrupted epoch continues.

Pieces of a step can differ by one sample, and a rank may have none in the last step. The loss of a
micro-batch is therefore weighted by its share of the step's samples, which every rank knows
without asking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]
"""The samples of an epoch in the order in which they are used, shape [num_samples]."""


@dataclass(frozen=True)
class MicroBatch:
    """What one rank reads for one forward and backward pass.

    Attributes:
        start: Place of the first sample in the epoch's order.
        stop: Place after the last sample.
        share: Samples of this micro-batch divided by the samples of the step over all ranks; 0: its samples
            are the first rank's, and it is read because all ranks are to read equally many micro-batches.
    """

    start: int
    stop: int
    share: float

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.stop - self.start


@dataclass(frozen=True)
class StepShare:
    """What one rank reads for one optimizer step.

    Attributes:
        cursor: Samples of the epoch used before this step, over all ranks.
        num_samples: Samples of this step, over all ranks.
        micro_batches: This rank's part; empty when there are fewer samples than ranks.
    """

    cursor: int
    num_samples: int
    micro_batches: tuple[MicroBatch, ...]

    @property
    def num_local_samples(self) -> int:
        """Samples of the step on this rank."""
        return sum(len(micro_batch) for micro_batch in self.micro_batches if micro_batch.share)

    @property
    def local_share(self) -> float:
        """Fraction of the step's samples on this rank."""
        return sum(micro_batch.share for micro_batch in self.micro_batches)


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool) -> Order:
    """Return the order of an epoch, shape [num_samples]: a permutation of 0 .. num_samples - 1.

    NumPy guarantees the stream of the legacy ``RandomState`` for ever, which a resumed job needs;
    newer generators may change between releases. Costs 8 bytes per sample.
    """
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    return np.random.RandomState([seed, epoch]).permutation(num_samples).astype(np.int64, copy=False)


def split_evenly(num_samples: int, rank: int, size: int) -> tuple[int, int]:
    """Return (start, stop) of a rank's piece; lengths differ by at most one.

    >>> [split_evenly(10, rank, 4) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    base, extra = divmod(num_samples, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def share_of_step(
    cursor: int,
    num_samples: int,
    *,
    batch_size: int,
    accumulation_steps: int,
    rank: int,
    size: int,
    equally_many: bool = False,
) -> StepShare:
    """Return a rank's part of the step that starts at a cursor and takes ``num_samples``.

    A short step is split over fewer ranks rather than into single samples, and a rank's piece into
    micro-batches of almost equal length: batch normalization cannot train on a lone sample. Only a
    step of one sample has a micro-batch of one (or of course a batch size of one).

    Args:
        cursor: Samples of the epoch used before.
        num_samples: Of the step, over all ranks.
        batch_size: Samples of a micro-batch at most.
        accumulation_steps: Micro-batches of a rank at most.
        rank: Of whom.
        size: How many ranks there are.
        equally_many: All ranks have as many micro-batches as the first. Those that a rank has too few are the
            first rank's, and do not count: forward and backward passes are collectives, or change what
            models keep.
    """
    num_needed = -(-num_samples // (batch_size * accumulation_steps))
    num_busy = min(size, max(num_needed, num_samples // 2, 1))

    def of_rank(rank: int) -> list[MicroBatch]:
        start, stop = split_evenly(num_samples, rank, num_busy)
        num_micro_batches = -(-(stop - start) // batch_size)
        pieces = [split_evenly(stop - start, at, num_micro_batches) for at in range(num_micro_batches)]
        return [
            MicroBatch(cursor + start + first, cursor + start + last, share=(last - first) / num_samples)
            for first, last in pieces
        ]

    micro_batches = of_rank(rank) if rank < num_busy else []
    if equally_many:
        micro_batches += [replace(each, share=0.0) for each in of_rank(0)[len(micro_batches) :]]
    return StepShare(cursor, num_samples, tuple(micro_batches))


def steps_of_epoch(
    *,
    num_samples: int,
    cursor: int,
    batch_size_per_rank: int,
    accumulation_steps: int,
    rank: int,
    size: int,
    equally_many: bool = False,
) -> Iterator[StepShare]:
    """Yield a rank's part of every step from a cursor to the end of the epoch.

    Every rank yields the same number of steps with the same cursors, so all of them take part in
    every collective; ``equally_many``: with as many micro-batches, too.
    """
    global_batch = batch_size_per_rank * accumulation_steps * size
    while cursor < num_samples:
        taken = min(global_batch, num_samples - cursor)
        yield share_of_step(
            cursor,
            taken,
            batch_size=batch_size_per_rank,
            accumulation_steps=accumulation_steps,
            rank=rank,
            size=size,
            equally_many=equally_many,
        )
        cursor += taken


def num_steps(num_samples: int, cursor: int, global_batch_size: int) -> int:
    """Return how many optimizer steps an epoch still has.

    >>> num_steps(100, 0, 32), num_steps(100, 96, 32), num_steps(100, 100, 32)
    (4, 1, 0)
    """
    return -(-(num_samples - cursor) // global_batch_size)


def eval_micro_batches(num_samples: int, batch_size: int, rank: int, size: int) -> tuple[MicroBatch, ...]:
    """Return what a rank reads to evaluate: every sample is read by exactly one rank."""
    start, stop = split_evenly(num_samples, rank, size)
    return tuple(
        MicroBatch(at, min(at + batch_size, stop), share=0.0) for at in range(start, stop, batch_size)
    )


def spare_eval_micro_batches(
    num_samples: int, batch_size: int, rank: int, size: int
) -> tuple[MicroBatch, ...]:
    """Return what a rank reads besides, and does not count, so that all ranks make equally many passes."""
    most, own = (len(eval_micro_batches(num_samples, batch_size, of, size)) for of in (0, rank))
    return (MicroBatch(0, min(batch_size, num_samples), share=0.0),) * (most - own)
