"""Assignment of samples to ranks, as a pure function of (samples, seed, epoch, cursor, rank, size).

An epoch is one order of all samples (``epoch_order``), equal on all ranks. The cursor is the number of
samples that all ranks together have used. One optimizer step uses the next ``global batch`` samples of the
order; the remaining samples at the end form one shorter step. Ranks split each step's samples into
consecutive slices of (almost) equal length, so

* every sample is used exactly once per epoch, for any number of ranks;
* n ranks with batch b use the same samples per step as one rank with batch n * b;
* an interrupted epoch resumes from the cursor alone, with any number of ranks.

The slices of a step differ by at most one sample. A step with fewer than two samples per rank (the last one
of an epoch, or each with a small ``train.global_batch_size``) is split over fewer ranks, with two or more
samples each where possible; the other ranks have none. The loss of a
micro-batch is therefore weighted by its part of the step's samples, computed without communication.

``PlannedSteps`` are the optimizer steps of one rank: the samples that it reads, and their batches. Plans and
orders cost nothing until they are read, so that an epoch may have any number of samples.
``WAITING`` contains the start time of this rank's current wait for data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt


class Order(Protocol):
    """The samples of an epoch in the order in which they are used."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, places: slice, /) -> npt.NDArray[np.int64]:
        """Return the samples at some places."""
        ...


@dataclass(frozen=True)
class InOrder:
    """The samples in the order of the dataset. Numbers are computed when they are needed."""

    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, places: slice, /) -> npt.NDArray[np.int64]:
        return np.arange(*places.indices(self.num_samples), dtype=np.int64)


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one rank for one forward and backward pass.

    Attributes:
        start: Index of the first sample in the epoch's order.
        stop: Index after the last sample.
        share: Samples of this micro-batch divided by the samples of the step over all ranks. 0: the samples
            belong to rank 0 (read to have as many micro-batches as rank 0), or to an evaluation.
    """

    start: int
    stop: int
    share: float

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.stop - self.start


@dataclass(frozen=True)
class StepShare:
    """The samples of one rank for one optimizer step.

    Attributes:
        cursor: Samples of the epoch used before this step, over all ranks.
        num_samples: Samples of this step, over all ranks.
        micro_batches: This rank's part; may be empty in a short step.
    """

    cursor: int
    num_samples: int
    micro_batches: tuple[MicroBatch, ...]

    @property
    def num_local_samples(self) -> int:
        """Number of the step's samples on this rank."""
        return sum(len(micro_batch) for micro_batch in self.micro_batches if micro_batch.share)

    @property
    def local_share(self) -> float:
        """Fraction of the step's samples on this rank."""
        return sum(micro_batch.share for micro_batch in self.micro_batches)


def epoch_order(num_samples: int, seed: int, epoch: int, *, shuffle: bool) -> Order:
    """Return the order of an epoch: a permutation of 0 .. num_samples - 1.

    A resumed job must compute the same order: NumPy guarantees that the stream of the legacy ``RandomState``
    never changes, while newer generators may change between releases. Uses 8 bytes per sample if shuffled.
    """
    if not shuffle:
        return InOrder(num_samples)
    return np.random.RandomState([seed, epoch]).permutation(num_samples).astype(np.int64, copy=False)


def split_evenly(num_samples: int, rank: int, size: int) -> tuple[int, int]:
    """Return (start, stop) of a rank's slice; lengths differ by at most one.

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
    equal_micro_batches: bool = False,
) -> StepShare:
    """Return a rank's part of the step that starts at a cursor and has ``num_samples``.

    Micro-batches of one sample are avoided because batch normalization cannot train on them: a short step
    is split over fewer ranks, and a rank's slice into micro-batches of almost equal length. With a batch
    size of at least 3, only a step of one sample has a micro-batch of one sample.

    Args:
        cursor: Samples of the epoch used before.
        num_samples: Samples of the step, over all ranks.
        batch_size: Maximum number of samples of a micro-batch.
        accumulation_steps: Maximum number of micro-batches of a rank.
        rank: The rank.
        size: Number of ranks.
        equal_micro_batches: All ranks have as many micro-batches as rank 0. A rank with fewer micro-batches
            reads further ones of rank 0, with weight 0. Required if passes are collectives or change the
            state of the model.
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
    if equal_micro_batches:
        micro_batches += [replace(each, share=0.0) for each in of_rank(0)[len(micro_batches) :]]
    return StepShare(cursor, num_samples, tuple(micro_batches))


class StepsOfEpoch(Sequence[StepShare]):
    """A rank's part of every step from a cursor to the end of the epoch. Each is computed when it is read.

    A step has ``global_batch_size`` samples, or fewer while the batch grows, or at the end of the epoch.

    Every rank has the same number of steps with the same cursors, so that all ranks take part in every
    collective. With ``equal_micro_batches``, the number of micro-batches is equal, too.

    Args:
        num_samples: Samples of the epoch.
        cursor: Samples used before, over all ranks.
        batch_size_per_rank: Maximum number of samples of a micro-batch.
        accumulation_steps: Maximum number of micro-batches of a rank.
        rank: The rank.
        size: Number of ranks.
        equal_micro_batches: See ``share_of_step``.
        global_batch_size: Samples of a step; None: the maximum, ``batch_size_per_rank`` x
            ``accumulation_steps`` x ``size``.
        batch_size_at: Returns the samples of the step that begins at a cursor, which do not decrease until
            they are ``global_batch_size``; None: they are from the start.
        max_steps: Maximum number of steps; None: no limit.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        cursor: int,
        batch_size_per_rank: int,
        accumulation_steps: int,
        rank: int,
        size: int,
        equal_micro_batches: bool = False,
        global_batch_size: int | None = None,
        batch_size_at: Callable[[int], int] | None = None,
        max_steps: int | None = None,
    ) -> None:
        self._num_samples = num_samples
        self._batch_size = global_batch_size or batch_size_per_rank * accumulation_steps * size
        self._share = partial(
            share_of_step,
            batch_size=batch_size_per_rank,
            accumulation_steps=accumulation_steps,
            rank=rank,
            size=size,
            equal_micro_batches=equal_micro_batches,
        )
        most = math.inf if max_steps is None else max_steps
        self._growing: list[int] = []  # cursors of the steps before the batch has its full size
        while batch_size_at is not None and cursor < num_samples and len(self._growing) < most:
            wanted = batch_size_at(cursor)
            if wanted >= self._batch_size:
                break
            self._growing.append(cursor)
            cursor += min(wanted, num_samples - cursor)
        self._full_from = cursor
        total = len(self._growing) + num_steps(num_samples, cursor, self._batch_size)
        self._length = int(min(total, most))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> StepShare: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[StepShare]: ...

    def __getitem__(self, place: int | slice) -> StepShare | Sequence[StepShare]:
        """Return a step, or a list of steps."""
        numbers = range(self._length)[place]
        return self._step(numbers) if isinstance(numbers, int) else [self._step(each) for each in numbers]

    def _step(self, number: int) -> StepShare:
        cursor = self._cursor_of(number)
        return self._share(cursor, min(self._cursor_of(number + 1), self._num_samples) - cursor)

    def _cursor_of(self, number: int) -> int:
        num_growing = len(self._growing)
        return (
            self._growing[number]
            if number < num_growing
            else self._full_from + (number - num_growing) * self._batch_size
        )


def num_steps(num_samples: int, cursor: int, global_batch_size: int) -> int:
    """Return the number of remaining optimizer steps of an epoch.

    >>> num_steps(100, 0, 32), num_steps(100, 96, 32), num_steps(100, 100, 32)
    (4, 1, 0)
    """
    return -(-(num_samples - cursor) // global_batch_size)


class EvalMicroBatches(Sequence[MicroBatch]):
    """The micro-batches of a rank for an evaluation; each sample is read by exactly one rank."""

    def __init__(self, num_samples: int, batch_size: int, rank: int, size: int) -> None:
        self._start, self._stop = split_evenly(num_samples, rank, size)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(range(self._start, self._stop, self._batch_size))

    @overload
    def __getitem__(self, place: int) -> MicroBatch: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[MicroBatch]: ...

    def __getitem__(self, place: int | slice) -> MicroBatch | Sequence[MicroBatch]:
        """Return a micro-batch, or a list of micro-batches."""
        starts = range(self._start, self._stop, self._batch_size)[place]
        return self._at(starts) if isinstance(starts, int) else [self._at(each) for each in starts]

    def _at(self, start: int) -> MicroBatch:
        return MicroBatch(start, min(start + self._batch_size, self._stop), share=0.0)


def spare_eval_micro_batches(
    num_samples: int, batch_size: int, rank: int, size: int
) -> tuple[MicroBatch, ...]:
    """Return additional micro-batches without weight, so that all ranks run equally many passes."""
    most, own = (len(EvalMicroBatches(num_samples, batch_size, of, size)) for of in (0, rank))
    return (MicroBatch(0, min(batch_size, num_samples), share=0.0),) * (most - own)


@dataclass(frozen=True)
class PlannedStep:
    """The samples of one step, for any training loop.

    All steps of an epoch read from one stream, so a loop must run them in order, each once.

    Attributes:
        share: This rank's part of the step's samples.
        is_last: Whether this is the last step of the epoch, or of the job.
        epoch: Number of the epoch, from 0.
    """

    share: StepShare
    _stream: Iterator[Any]
    is_last: bool = False
    epoch: int = 0

    def __len__(self) -> int:
        """Return the number of micro-batches; 0 is possible in a short step."""
        return len(self.share.micro_batches)

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield each micro-batch with its batch."""
        for micro_batch in self.share.micro_batches:
            yield micro_batch, next(self._stream)

    def share_at(self, place: int) -> float:
        """Return the part of the step's samples that is in a micro-batch; 0: there is no such micro-batch."""
        micro_batches = self.share.micro_batches
        return micro_batches[place].share if place < len(micro_batches) else 0.0

    def padded(self, num_micro_batches: int, spare: Callable[[], object]) -> Iterator[tuple[float, Any]]:
        """Yield batches, and ``spare()`` for missing ones, for loops that require equal numbers on all ranks.

        Yields:
            The part of the step's samples that is in the batch (0 for a spare batch), and the batch.
        """
        for place in range(num_micro_batches):
            share = self.share_at(place)
            yield share, next(self._stream) if share else spare()


@dataclass(frozen=True)
class _MicroBatches:
    """The micro-batches of steps, for any number of iterations."""

    shares: Sequence[StepShare]

    def __iter__(self) -> Iterator[MicroBatch]:
        return (micro_batch for share in self.shares for micro_batch in share.micro_batches)


class PlannedSteps(Sequence[PlannedStep]):
    """The remaining steps of a rank in an epoch. Each is computed when it is read.

    Args:
        shares: This rank's part of each step.
        read: Returns the stream of batches of the given micro-batches.
        epoch: Number of the epoch, from 0.
    """

    def __init__(
        self,
        shares: Sequence[StepShare] = (),
        read: Callable[[Iterable[MicroBatch]], Iterator[Any]] = iter,
        epoch: int = 0,
    ) -> None:
        self._shares, self._epoch = shares, epoch
        self._stream = read(_MicroBatches(shares))

    def __len__(self) -> int:
        return len(self._shares)

    @overload
    def __getitem__(self, place: int) -> PlannedStep: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[PlannedStep]: ...

    def __getitem__(self, place: int | slice) -> PlannedStep | Sequence[PlannedStep]:
        """Return a step, or a list of steps."""
        numbers = range(len(self))[place]
        return self._step(numbers) if isinstance(numbers, int) else [self._step(each) for each in numbers]

    def _step(self, number: int) -> PlannedStep:
        is_last = number == len(self) - 1
        return PlannedStep(self._shares[number], self._stream, is_last, self._epoch)


@dataclass
class Waiting:
    """The current wait for a batch.

    Attributes:
        since_s: Its start (``monotonic``); None: not waiting.
        what: Returns what is being waited for; empty: unknown.
    """

    since_s: float | None = None
    what: Callable[[], str] = str


WAITING = Waiting()


def timed(batches: Iterator[object], what: Callable[[], str] = str) -> Iterator[object]:
    """Yield batches, and record each wait in ``WAITING``."""
    while True:
        WAITING.since_s, WAITING.what = monotonic(), what
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            WAITING.since_s = None
        yield batch
