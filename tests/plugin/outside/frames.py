"""A source with arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from horovod_train.config.fields import Count
from horovod_train.data.source import ByteRanges, DataError, Rows


class Frames(ByteRanges):
    """Files of frames: numbers of type float32, the same number in each frame."""

    numbers: Count
    """Numbers in a frame."""

    def rows(self, file: Path) -> Rows:
        """Return the range of each frame."""
        size_bytes, rest = 4 * self.numbers, file.stat().st_size % (4 * self.numbers)
        if rest:
            raise DataError(f"has {rest} bytes more than whole frames")
        starts = np.arange(0, file.stat().st_size, size_bytes, dtype=np.int64)
        return np.stack([starts, np.full_like(starts, size_bytes)], axis=1)

    def parse(self, data: bytes) -> object:
        """Return the numbers of a frame, and those that the task wants to be predicted."""
        return np.frombuffer(data, np.float32), np.ones(2, np.float32)
