"""Keras on JAX."""

from __future__ import annotations

import os

import keras

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator
from horovod_train.plugins.jax import framework
from horovod_train.plugins.jax.framework import Exchange
from horovod_train.plugins.keras.back_ends import BackEnd


class JaxBackEnd(BackEnd):
    """JAX: ``fit`` stores the values of variables outside of the model."""

    optimizer_sees_micro_steps = True

    def communicator_class(self) -> type[HorovodCommunicator]:
        """Return the communicator for PyTorch, because Horovod has no binding for JAX."""
        return TorchCommunicator

    def exchange(self, world: Communicator, bucket_size_bytes: int, wire_dtype: str) -> Exchange:
        return Exchange(world, bucket_size_bytes, wire_dtype)

    def limit_threads(self, num_threads: int) -> None:
        """Set the number of XLA's threads, at least 2: a callback blocks one while it waits for ranks."""
        os.environ.setdefault("NPROC", str(max(2, num_threads)))

    def be_deterministic(self) -> None:
        """Disable nondeterministic operations on GPUs; XLA has none on a CPU."""
        framework.be_deterministic()

    def choose_device(self, job: Job, world: Communicator) -> None:
        framework.choose_device(job, world)

    def sync_variables(self, model: keras.Model) -> None:
        """Copy the values of variables from ``fit`` to the model."""
        model.jax_state_sync()
