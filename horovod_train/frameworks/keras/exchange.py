"""The ranks and the sum over them, for the back end that Keras uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import keras

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Allreduce, Job
from horovod_train.errors import UserError
from horovod_train.frameworks.join import join


class Exchange(Protocol):
    """Sums lists of the back end's tensors over ranks. It may make the sums where the tensors were.

    Attributes:
        seconds: Time spent waiting for other ranks, so far; 0 where it cannot be seen.
    """

    seconds: float

    def sum(self, tensors: Sequence[keras.KerasTensor], name: str = "gradients") -> list[keras.KerasTensor]:
        """Return the elementwise sums; every rank calls it in the same order."""
        ...

    def mean(self, tensors: Sequence[keras.KerasTensor]) -> list[keras.KerasTensor]:
        """Return the elementwise means; every rank calls it in the same order."""
        ...

    def bytes_on_wire(self, tensors: Sequence[keras.KerasTensor]) -> int:
        """Return how many bytes a rank gives away when such tensors are summed."""
        ...


def init(job: Job | None = None) -> Communicator:
    """Join the ranks this process was started with; a world of one when there are none.

    Raises:
        EngineError: Started as one of several ranks, and Horovod is missing or cannot start.
    """
    return join(communicator_class(), job)


def communicator_class() -> type[HorovodCommunicator]:
    """Return the world of the back end that Keras uses."""
    if keras.backend.backend() == "tensorflow":
        from horovod_train.frameworks.tensorflow.collectives import TensorflowCommunicator

        return TensorflowCommunicator
    from horovod_train.frameworks.torch.collectives import TorchCommunicator

    return TorchCommunicator


def make_exchange(world: Communicator, allreduce: Allreduce) -> Exchange:
    """Return what sums tensors of the back end that Keras uses.

    Raises:
        UserError: Keras uses a back end that cannot train on several ranks.
    """
    size_bytes = int(allreduce.bucket_size_mib * 2**20)
    wire_dtype = {"fp32": "float32", "fp16": "float16"}[allreduce.wire_dtype]
    match keras.backend.backend():
        case "tensorflow":
            import tensorflow as tf

            from horovod_train.frameworks.tensorflow import reducer

            return reducer.Exchange(world, size_bytes, tf.as_dtype(wire_dtype))
        case "torch":
            import torch

            from horovod_train.frameworks.torch import exchange

            return exchange.Exchange(world, size_bytes, getattr(torch, wire_dtype))
        case "jax":
            from horovod_train.frameworks.jax import reducer as jax_reducer

            return jax_reducer.Exchange(world, size_bytes, wire_dtype)
        case other:
            raise UserError(
                f"Keras uses the back end {other!r}, which cannot train on several ranks",
                hint="set KERAS_BACKEND to tensorflow, torch or jax",
            )
