"""State and seeds of the random generators of Python, NumPy and PyTorch."""

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
    """Load a state that ``rng_state`` returned. CUDA states are loaded if the number of GPUs agrees."""
    own = randomness.load_rng_state(tree, arrays)
    torch.set_rng_state(torch.from_numpy(own["torch"]))
    if own["cuda"] and len(own["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.from_numpy(state) for state in own["cuda"]])


def seed_generators(seed: int, rank: int, epoch: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators with a mix of seed, rank and epoch."""
    mixed = mix(seed, rank, epoch)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)
