"""State of random generators: those of Python and NumPy, and those of a framework."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.checkpoint.tree import pack_tree, unpack_tree
from horovod_train.frameworks.arrays import from_blob, to_blob


def mix(seed: int, rank: int, epoch: int) -> int:
    """Return a 64-bit seed: a hash of the three numbers."""
    return int(np.random.SeedSequence([seed, rank, epoch]).generate_state(1, np.uint64)[0])


def rng_state(own: Mapping[str, object]) -> tuple[object, dict[str, ArrayBlob]]:
    """Return the state of Python's, NumPy's and the framework's generators (``own``: data and arrays)."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "own": dict(own),
    }
    plain, arrays = pack_tree(state, lambda leaf: isinstance(leaf, np.ndarray))
    return plain, {key: to_blob(array) for key, array in arrays.items()}


def load_rng_state(tree: object, arrays: Mapping[str, ArrayBlob]) -> dict[str, Any]:
    """Load the state of Python's and NumPy's generators; return that of the framework's generators."""
    state = unpack_tree(tree, {key: from_blob(blob) for key, blob in arrays.items()})
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    own: dict[str, Any] = state["own"]
    return own
