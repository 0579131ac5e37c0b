"""Order of samples, as a function of the position, without an array of all samples.

    DataOrder        what determines the order of a job; a checkpoint contains it
    order_of         the order of an epoch
    OrderOfFiles     a permutation of the samples in files
    Passes, Draws, Mixture, SimilarLengths
                     sequences without an end, of which each epoch is a part: one pass over the data after the
                     other, samples drawn by their weights, several sequences, batches of similar length

In ``OrderOfFiles``:

    files     permuted; their concatenation is the line of samples
    lanes     the line is cut into parts of equal length, which are read side by side
    blocks    parts of a lane, within which samples are permuted: the window of the shuffle is all current
              blocks of all lanes
    rows      a row takes the same number of consecutive samples of each lane, lane by lane

If a global batch is a row, and hosts divide its lanes, then each host reads only the files of its lanes,
although the global order does not depend on the number of ranks. With another global batch, after a resume on
other ranks for example, the order is the same, and files are read by more hosts. Any position is found in
O(log files); memory is 20 bytes per file besides the sizes, and two blocks of 4 bytes per sample for each
lane that is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from horovod_train.data.shard import Order, epoch_order
from horovod_train.errors import UserError

MAX_LANES = 64
BLOCK_SIZE = 2**14
BLOCKS_PER_LANE = 2
MAX_PERMUTATION = 2**24
"""Samples up to which a dataset that can be read at any place has an array of its order: 128 MiB, 1 s."""

Numbers = npt.NDArray[np.int64]
_LOCK = Lock()
"""Orders retain what they have computed, and the thread that copies files ahead reads them, too."""


def lanes_of(global_batch_size: int) -> int:
    """Return the number of lanes for a global batch: its largest divisor that is at most ``MAX_LANES``.

    >>> [lanes_of(size) for size in (1, 24, 97, 100, 256)]
    [1, 24, 1, 50, 64]
    """
    return max(lanes for lanes in range(1, MAX_LANES + 1) if global_batch_size % lanes == 0)


@dataclass
class OrderOfFiles:
    """The samples of files in a random order. A sample's number counts from the first sample of all files.

    The order never changes between releases: NumPy guarantees that of the legacy ``RandomState``.

    Attributes:
        sizes: Number of samples of each file, shape [files]; may be 0.
        seed: Seed of the job.
        epoch: Number of the epoch, from 0.
        row_size: Samples of a row: the global batch when the job was started first.
        block_size: Samples of a block.
    """

    sizes: Numbers
    seed: int
    epoch: int
    row_size: int
    block_size: int = BLOCK_SIZE
    _blocks: OrderedDict[tuple[int, int], npt.NDArray[np.int32]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        """Permute the files, and cut lanes."""
        self._files = self._random().permutation(len(self.sizes)).astype(np.int32)
        self._begins = np.concatenate(
            [[0], np.cumsum(self.sizes[self._files])]
        )  # of permuted files, in the line
        self._first = np.cumsum(self.sizes) - self.sizes  # numbers of first samples
        self._num_lanes = lanes_of(self.row_size)
        self._per_lane = self.row_size // self._num_lanes
        self._cuts = np.arange(self._num_lanes + 1) * len(self) // self._num_lanes  # of lanes, in the line
        lengths = np.diff(self._cuts)
        self._num_rows = int(lengths.min()) // self._per_lane
        # What remains of lanes after all whole rows follows lane by lane.
        self._rests = np.concatenate([[0], np.cumsum(lengths - self._num_rows * self._per_lane)])

    def _random(self, *place: int) -> np.random.RandomState:
        return np.random.RandomState([self.seed, self.epoch, *place])

    def __len__(self) -> int:
        return int(self.sizes.sum())

    def __getitem__(self, places: slice, /) -> Numbers:
        """Return the numbers of the samples at some places of the order."""
        return self.at(np.arange(*places.indices(len(self)), dtype=np.int64))

    def files_at(self, places: Numbers) -> Numbers:
        """Return the file of the sample at each place."""
        return self._files[self._permuted_file(self._line_places(places))].astype(np.int64)

    def at(self, places: Numbers) -> Numbers:
        """Return the numbers of the samples at some places."""
        line = self._line_places(places)
        file = self._permuted_file(line)
        found: Numbers = self._first[self._files[file]] + line - self._begins[file]
        return found

    def _permuted_file(self, line: Numbers) -> Numbers:
        found: Numbers = (
            np.searchsorted(self._begins, line, "right") - 1
        )  # of empty files, the one behind them
        return found

    def _line_places(self, places: Numbers) -> Numbers:
        """Return the place in the line of files of each place in the order."""
        row, column = np.divmod(places, self.row_size)
        behind = places - self._num_rows * self.row_size  # the last whole row
        is_rest = behind >= 0
        lane = np.where(is_rest, np.searchsorted(self._rests, behind, "right") - 1, column // self._per_lane)
        in_lane = np.where(
            is_rest,
            self._num_rows * self._per_lane + behind - self._rests[lane],
            row * self._per_lane + column % self._per_lane,
        )
        return self._cuts[lane] + self._shuffled(lane, in_lane)

    def _shuffled(self, lanes: Numbers, in_lane: Numbers) -> Numbers:
        """Permute places in lanes within their blocks."""
        blocks, inside = np.divmod(in_lane, self.block_size)
        # Places of one block are consecutive, or nearly so: a lane's part of a row is.
        begins = np.flatnonzero(np.diff(lanes, prepend=-1) | np.diff(blocks, prepend=-1)).tolist()
        for begin, end in pairwise([*begins, len(lanes)]):
            inside[begin:end] = self._block(int(lanes[begin]), int(blocks[begin]))[inside[begin:end]]
        return blocks * self.block_size + inside

    def _block(self, lane: int, block: int) -> npt.NDArray[np.int32]:
        """Return the permutation of a block of a lane."""
        key = lane, block
        if key not in self._blocks:
            length = int(self._cuts[lane + 1] - self._cuts[lane]) - block * self.block_size
            made = self._random(lane, block).permutation(min(self.block_size, length))
            self._blocks[key] = made.astype(np.int32)
            while len(self._blocks) > BLOCKS_PER_LANE * self._num_lanes:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]


@dataclass(frozen=True)
class DataOrder:
    """Settings that determine the order of samples, which must not change within an epoch.

    Attributes:
        num_samples: Samples of an epoch.
        seed: Seed of the job.
        shuffle: Whether samples are shuffled.
        kind: ``permutation``: an array of all samples; ``files``: an ``OrderOfFiles``, or what is made of it.
            A resumed job retains the kind of its checkpoint.
        num_in_pass: Samples of the data, if passes end within epochs; 0: an epoch is a pass.
        row_size: Samples of the global batch when the job was started first; 0: not needed by this kind.
        digest: Digest of the files, and of how their samples are chosen; empty: the dataset has none.
    """

    num_samples: int
    seed: int
    shuffle: bool
    kind: str = "permutation"
    num_in_pass: int = 0
    row_size: int = 0
    digest: str = ""


class Endless(Protocol):
    """Numbers of samples at all places from 0."""

    def at(self, places: Numbers) -> Numbers:
        """Return the samples at some places."""
        ...


class HasOrder(Protocol):
    """A dataset with an order of its own."""

    def endless(self, order: DataOrder) -> Endless:
        """Return the samples of all epochs, one epoch after the other."""
        ...

    def digest(self) -> str:
        """Return a digest of the files, and of how their samples are chosen."""
        ...


@dataclass(frozen=True)
class PartOf:
    """An epoch: consecutive places of a sequence without an end."""

    whole: Endless
    start: int
    length: int
    repeats: bool = True
    """An epoch may have a sample twice: its random numbers belong to the place."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, places: slice, /) -> Numbers:
        """Return the samples at some places."""
        numbers = self.start + np.arange(*places.indices(self.length), dtype=np.int64)
        with _LOCK:
            return self.whole.at(numbers)


def settings_of(
    dataset: object, length: int, *, seed: int, shuffle: bool, samples_per_epoch: int | None, row_size: int
) -> DataOrder:
    """Return the settings of the order of a dataset, for a job that starts now.

    Args:
        dataset: The dataset.
        length: Number of its samples.
        seed: Seed of the job.
        shuffle: Whether samples are shuffled.
        samples_per_epoch: Samples of an epoch; None: all.
        row_size: Samples of the global batch.
    """
    has_order = hasattr(dataset, "endless")
    is_mixture = has_order and getattr(dataset, "is_mixture", False)
    kind = "files" if has_order or length > MAX_PERMUTATION else "permutation"
    return DataOrder(
        num_samples=samples_per_epoch or length,
        seed=seed,
        shuffle=shuffle,
        kind=kind,
        num_in_pass=length if samples_per_epoch not in (None, length) or is_mixture else 0,
        row_size=row_size if kind == "files" else 0,
        digest=dataset.digest() if hasattr(dataset, "digest") else "",
    )


def resumed(old: DataOrder, now: DataOrder) -> DataOrder:
    """Return the settings of a job that resumes: those that a checkpoint decides are as in it."""
    is_replaced = old.kind == "permutation" and now.digest  # data of the task, by files
    if is_replaced or (old.kind != now.kind and now.kind == "permutation"):
        return now
    return replace(now, kind=old.kind, row_size=old.row_size)


def order_of(order: DataOrder, dataset: object, epoch: int) -> Order:
    """Return the order of an epoch of a dataset, which has a method ``endless`` if it has its own order."""
    is_pass = order.num_in_pass in (0, order.num_samples)
    if hasattr(dataset, "endless"):
        endless = _endless_of(order, dataset)
    elif is_pass and order.kind == "permutation":
        return epoch_order(order.num_samples, order.seed, epoch, shuffle=order.shuffle)
    else:
        endless = Passes.over(order)
    repeats = not is_pass or not isinstance(endless, Passes)
    return PartOf(endless, epoch * order.num_samples, order.num_samples, repeats)


@lru_cache(maxsize=1)  # it keeps what it has computed
def _endless_of(order: DataOrder, dataset: HasOrder) -> Endless:
    return dataset.endless(order)


class Passes:
    """One pass over all samples after the other.

    Args:
        length: Samples of a pass.
        make: Returns the order of a pass.
    """

    def __init__(self, length: int, make: Callable[[int], Order]) -> None:
        self._length = length
        self._order = lru_cache(maxsize=3)(make)

    @classmethod
    def over(cls, order: DataOrder, sizes: Numbers | None = None) -> Passes:
        """Return the passes of a job over samples, or over those of files with such numbers of samples."""
        length = order.num_in_pass or order.num_samples
        if order.kind == "files" and order.shuffle:
            files = sizes if sizes is not None else np.array([length])
            return cls(length, lambda number: OrderOfFiles(files, order.seed, number, order.row_size))
        return cls(length, lambda number: epoch_order(length, order.seed, number, shuffle=order.shuffle))

    def at(self, places: Numbers) -> Numbers:
        """Return the samples at some places, which are consecutive or nearly so."""
        number, inside = np.divmod(places, self._length)
        found = np.empty_like(places)
        for each in np.unique(number).tolist():
            mine = number == each
            order = self._order(each)
            if isinstance(order, OrderOfFiles):
                found[mine] = order.at(inside[mine])
            else:
                low, high = int(inside[mine].min()), int(inside[mine].max())
                found[mine] = order[low : high + 1][inside[mine] - low]
        return found


def uniform(seed: int, places: Numbers) -> npt.NDArray[np.float64]:
    """Return a number from [0, 1) for each place: a hash of 53 bits."""
    start = (seed + 1) * 0xD1B54A32D192ED03 % 2**64
    return np.asarray((hashes(places, start) >> np.uint64(11)).astype(np.float64) / 2.0**53)


GOLDEN = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: multiples of it spread seeds."""


def hashes(numbers: npt.ArrayLike, start: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each number: the numbers of a generator that begins at ``start``.

    The mixer is that of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        x = np.asarray(numbers, np.uint64) * np.uint64(GOLDEN) + np.uint64(start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)), np.uint64)


@dataclass
class Draws:
    """Samples drawn by their weights, with replacement. Each draw is a function of its place.

    Attributes:
        ends: Cumulative sums of the samples' weights, which are at least 0, shape [samples].
        seed: Seed of the job.
    """

    ends: npt.NDArray[np.float64]
    seed: int

    def at(self, places: Numbers) -> Numbers:
        """Return the samples at some places."""
        drawn = uniform(self.seed, places) * self.ends[-1]
        last = np.searchsorted(self.ends, self.ends[-1], "left")  # those behind it have the weight 0
        found: Numbers = np.minimum(np.searchsorted(self.ends, drawn, "right"), last).astype(np.int64)
        return found


def without_replacement(
    weights: npt.NDArray[np.float64], seed: int, length: int
) -> Callable[[int], npt.NDArray[np.int64]]:
    """Return a function of the epoch: ``length`` samples drawn by their weights, each at most once.

    The keys are those of Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006).
    """

    def of_epoch(epoch: int) -> npt.NDArray[np.int64]:
        drawn = np.random.RandomState([seed, epoch]).random_sample(len(weights))
        with np.errstate(divide="ignore"):
            keys = np.where(weights > 0, -np.log1p(-drawn) / weights, np.inf)
        return np.argsort(keys, kind="stable")[:length].astype(np.int64)

    return of_epoch


@dataclass
class Mixture:
    """Several sequences, in exact proportions: each block has the same counts.

    Attributes:
        parts: The sequences.
        first: Number of the first sample of each part, in the dataset of all parts.
        proportions: Part of the samples that each has; their sum is 1.
        block_size: Places of a block, within which parts alternate.
    """

    parts: Sequence[Endless]
    first: Sequence[int]
    proportions: Sequence[float]
    block_size: int = 2**16

    @cached_property
    def counts(self) -> Numbers:
        """Samples of each part in a block: the largest remainders are rounded up."""
        exact = np.asarray(self.proportions) * self.block_size
        counts: Numbers = np.floor(exact).astype(np.int64)
        missing = self.block_size - int(counts.sum())
        counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
        if not counts.all():
            raise UserError(
                "data.mixture: a part is too small to be used",
                hint=f"its proportion must be at least 1 / {self.block_size} of all",
            )
        return counts

    @cached_property
    def _pattern(self) -> tuple[Numbers, Numbers]:
        """Part at each place of a block, and how many of its samples are before it."""
        parts = np.repeat(np.arange(len(self.counts)), self.counts)
        inside = np.concatenate([np.arange(count) for count in self.counts])
        order = np.argsort((inside + 0.5) / self.counts[parts], kind="stable")
        return parts[order], inside[order]

    def at(self, places: Numbers) -> Numbers:
        """Return the samples at some places."""
        block, offset = np.divmod(places, self.block_size)
        parts, inside = (of_block[offset] for of_block in self._pattern)
        found = np.empty_like(places)
        for part, sequence in enumerate(self.parts):
            mine = parts == part
            if mine.any():
                of_part = block[mine] * self.counts[part] + inside[mine]
                found[mine] = self.first[part] + sequence.at(of_part)
        return found


@dataclass
class SimilarLengths:
    """Batches of samples of similar length.

    The samples of a number of batches are sorted by their length, and these batches are shuffled. Which
    samples these are is not changed, so that each is still used once.

    Attributes:
        whole: The sequence.
        lengths: Length of each sample, shape [samples].
        batch_size: Samples of a batch.
        num_batches: Number of batches.
        seed: Seed of the job.
        end: Number of samples after which another pass begins, in which a sample may occur again.
    """

    whole: Endless
    lengths: npt.NDArray[np.int64]
    batch_size: int
    seed: int
    end: int
    num_batches: int = 64
    _windows: OrderedDict[tuple[int, int], Numbers] = field(default_factory=OrderedDict)

    def at(self, places: Numbers) -> Numbers:
        """Return the samples at some places."""
        number, inside = np.divmod(places, self.end)
        window, offset = np.divmod(inside, self.batch_size * self.num_batches)
        found = np.empty_like(places)
        for key in sorted({*zip(number.tolist(), window.tolist(), strict=True)}):
            mine = (number == key[0]) & (window == key[1])
            found[mine] = self._window(*key)[offset[mine]]
        return found

    def _window(self, number: int, window: int) -> Numbers:
        key = number, window
        if key not in self._windows:
            size = self.batch_size * self.num_batches
            start, stop = window * size, min((window + 1) * size, self.end)
            samples = self.whole.at(number * self.end + np.arange(start, stop))
            samples = samples[np.argsort(self.lengths[samples], kind="stable")]
            whole = len(samples) // self.batch_size * self.batch_size
            batches = samples[:whole].reshape(-1, self.batch_size)
            shuffled = np.random.RandomState([self.seed, number, window]).permutation(len(batches))
            self._windows[key] = np.concatenate([batches[shuffled].ravel(), samples[whole:]])
            while len(self._windows) > 4:
                self._windows.popitem(last=False)
        return self._windows[key]
