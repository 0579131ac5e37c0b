"""JSON lines: each line of a file is a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.data.source import ByteRanges, DataError, Rows


class JsonLines(ByteRanges):
    """Files with a JSON value in each line, plain or compressed. A stored sample is this value."""

    def rows(self, file: Path) -> Rows:
        """Return the range of each line that is not empty."""
        found = []
        start = 0
        with file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    found.append((start, len(line)))
                start += len(line)
        return np.array(found, np.int64).reshape(-1, 2)

    def parse(self, data: bytes) -> Any:
        """Return the value of a line."""
        try:
            return json.loads(data)
        except ValueError as error:
            raise DataError(f"has a line that is not JSON: {error}: {data[:60]!r}") from error
