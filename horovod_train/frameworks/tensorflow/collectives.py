"""Communicator that uses Horovod's TensorFlow binding."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from horovod_train.collectives.horovod import Array, HorovodCommunicator


class TensorflowCommunicator(HorovodCommunicator):
    """Communicator for TensorFlow."""

    BINDING = "tensorflow"

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        # Operations in a graph raise these instead of Horovod's error.
        self.lost = (*self.lost, tf.errors.UnknownError, tf.errors.FailedPreconditionError)

    def allreduce_array(self, array: Array, name: str) -> Array:
        """Return the elementwise sum over ranks."""
        with tf.device("CPU:0"):
            total = self.hvd.allreduce(tf.constant(array), op=self.hvd.Sum, name=name)
        result: Array = total.numpy()
        return result

    def allgather_arrays(self, array: Array, name: str) -> Array:
        """Return the concatenated arrays of all ranks, by rank."""
        with tf.device("CPU:0"):
            joined: Array = self.hvd.allgather(tf.constant(array), name=name).numpy()
        return joined
