"""Keras on JAX."""

from __future__ import annotations

import os

import keras

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Job
from horovod_train.frameworks.jax import framework
from horovod_train.frameworks.jax.exchange import Exchange
from horovod_train.frameworks.keras.back_ends.base import BackEnd
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator


class JaxBackEnd(BackEnd):
    """JAX: variables live outside of the model while ``fit`` trains."""

    optimizer_sees_micro_steps = True

    def communicator_class(self) -> type[HorovodCommunicator]:
        """Return Horovod's binding for PyTorch."""
        return TorchCommunicator

    def exchange(self, world: Communicator, bucket_size_bytes: int, wire_dtype: str) -> Exchange:
        """Return JAX's exchange."""
        return Exchange(world, bucket_size_bytes, wire_dtype)

    def limit_threads(self, num_threads: int) -> None:
        """Limit XLA's threads; the callback holds one of them while it waits for other ranks."""
        os.environ.setdefault("NPROC", str(max(2, num_threads)))

    def be_deterministic(self) -> None:
        """Refuse operations whose result can differ; on a CPU, XLA has none."""
        framework.be_deterministic()

    def choose_device(self, job: Job, world: Communicator) -> None:
        """Take the rank's own GPU, or the CPU."""
        framework.choose_device(job, world)

    def take_back_state(self, model: keras.Model) -> None:
        """Have ``fit`` hand the variables back."""
        model.jax_state_sync()
