"""The GPU of this rank, and random generators, for frameworks based on PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.config.schema import Job
from horovod_train.errors import HorovodTrainError
from horovod_train.frameworks.devices import gpu_uuid
from horovod_train.frameworks.torch.comm.device_errors import device_error
from horovod_train.frameworks.torch.state import generators


class TorchBased:
    """Base class of frameworks based on PyTorch: GPU and random generators of a rank."""

    def gpu_uuid(self) -> str:
        """Return the UUID of this rank's GPU; empty: it has none."""
        return gpu_uuid(torch.cuda.current_device()) if torch.cuda.is_available() else ""

    def device_memory(self) -> tuple[int, int | None, int] | None:
        """Return the allocated, reserved and peak allocated GPU memory, in bytes; None: there is no GPU."""
        if not torch.cuda.is_available():
            return None
        return (
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            torch.cuda.max_memory_allocated(),
        )

    def explain(self, error: Exception, job: Job, rank: int) -> HorovodTrainError | None:
        """Return this package's error for a device error; None: it is another error."""
        return device_error(error, job, rank)

    def rng_state(self) -> tuple[object, Mapping[str, ArrayBlob]]:
        """Return the state of all random generators."""
        return generators.rng_state()

    def load_rng_state(self, tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
        """Load the state of all random generators."""
        generators.load_rng_state(tree, arrays)

    def seed(self, seed: int, rank: int, epoch: int) -> None:
        """Seed all random generators of this rank."""
        generators.seed_generators(seed, rank, epoch)
