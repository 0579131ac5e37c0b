"""Order of the samples in files, as a function of the position, without an array of all samples.

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
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

MAX_LANES = 64
BLOCK_SIZE = 2**14
BLOCKS_PER_LANE = 2

Numbers = npt.NDArray[np.int64]


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
        return self._numbers(np.arange(*places.indices(len(self)), dtype=np.int64))

    def files_at(self, places: Numbers) -> Numbers:
        """Return the file of the sample at each place."""
        return self._files[self._permuted_file(self._line_places(places))].astype(np.int64)

    def _numbers(self, places: Numbers) -> Numbers:
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
