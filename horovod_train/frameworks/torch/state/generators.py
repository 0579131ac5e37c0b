"""The random generators of Python, NumPy and PyTorch: their state, and their seeds."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.frameworks import randomness
from horovod_train.frameworks.randomness import mix


def rng_state() -> tuple[object, dict[str, ArrayBlob]]:
    """Return the state of Python's, NumPy's and PyTorch's generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return randomness.rng_state(
        {"torch": torch.get_rng_state().numpy(), "cuda": [state.numpy() for state in cuda]}
    )


def load_rng_state(tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
    """Take over what ``rng_state`` returned."""
    own = randomness.load_rng_state(tree, arrays)
    torch.set_rng_state(torch.from_numpy(own["torch"]))
    if own["cuda"] and len(own["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.from_numpy(state) for state in own["cuda"]])


def seed_generators(seed: int, rank: int, epoch: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators with a mix of three numbers."""
    mixed = mix(seed, rank, epoch)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)
