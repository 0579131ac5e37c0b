"""The handwritten digits of scikit-learn, read without importing it, because the import takes long."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def digit_images() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return 1,797 images of 8 x 8 pixels with values 0 .. 16, and their classes, 0 .. 9.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    # The format of sklearn.datasets.load_digits: one image per line, with its class at the end.
    lines = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return lines[:, :-1].reshape(-1, 8, 8), lines[:, -1].astype(np.int64)
