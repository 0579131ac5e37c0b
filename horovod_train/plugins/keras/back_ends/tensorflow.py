"""Keras on TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.plugins.keras.back_ends import BackEnd
from horovod_train.plugins.keras.data import open_dataset
from horovod_train.plugins.tensorflow import framework
from horovod_train.plugins.tensorflow.framework import Exchange, TensorflowCommunicator


class TensorflowBackEnd(BackEnd):
    """TensorFlow: a step is a graph, which also reads its batch."""

    reads_inside_step = True

    def communicator_class(self) -> type[HorovodCommunicator]:
        return TensorflowCommunicator

    def exchange(self, world: Communicator, bucket_size_bytes: int, wire_dtype: str) -> Exchange:
        return Exchange(world, bucket_size_bytes, tf.as_dtype(wire_dtype))

    def limit_threads(self, num_threads: int) -> None:
        """Set the number of threads of one operation."""
        tf.config.threading.set_intra_op_parallelism_threads(num_threads)

    def be_deterministic(self) -> None:
        tf.config.experimental.enable_op_determinism()

    def choose_device(self, job: Job, world: Communicator) -> None:
        framework.choose_device(job, world)

    def check_compile(self, arguments: dict[str, Any]) -> None:
        """Disable XLA, Keras's default on GPUs, because it cannot compile Horovod's operations."""
        if arguments.get("jit_compile") is True:
            raise UserError(
                "compile() says jit_compile=True, but on TensorFlow XLA cannot compile the exchange of ranks",
                hint="leave jit_compile out, or use KERAS_BACKEND=jax, where it can",
            )
        arguments["jit_compile"] = False

    def with_shapes(self, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> Sequence[Any]:
        """Return gradients with known shapes; that of a Dense layer on 3 dimensions is not known."""
        return [
            each if each is None or isinstance(each, tf.IndexedSlices) else tf.ensure_shape(each, of.shape)
            for each, of in zip(gradients, variables, strict=True)
        ]

    def stream(self, batches: Iterator[tuple[object, ...]]) -> AbstractContextManager[object]:
        return open_dataset(batches)
