"""State of random generators: those of Python and NumPy, and those of a framework."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.checkpoint.tree import pack_tree, unpack_tree
from horovod_train.frameworks.arrays import from_blob, to_blob


def mix(seed: int, rank: int, epoch: int) -> int:
    """Return a 64-bit seed: a hash of the three numbers."""
    return int(np.random.SeedSequence([seed, rank, epoch]).generate_state(1, np.uint64)[0])


GOLDEN = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: multiples of it spread seeds."""


def sample_seeds(seed: int, epoch: int, numbers: Iterable[int]) -> npt.NDArray[np.uint64]:
    """Return a 64-bit seed for each sample: a hash of seed, epoch and the sample's number, shape [samples].

    The mixer is that of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        x = np.fromiter(numbers, np.uint64) * np.uint64(GOLDEN) + np.uint64(mix(seed, 0, epoch))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)), np.uint64)


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
