"""Communicator that uses Horovod's MXNet binding."""

from __future__ import annotations

from collections.abc import Mapping

import mxnet as mx

from horovod_train.collectives.horovod import Array, HorovodCommunicator


class MxnetCommunicator(HorovodCommunicator):
    """Communicator for MXNet."""

    BINDING = "mxnet"

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        # MXNet's engine runs collectives asynchronously, and raises their errors as MXNetError.
        self.lost = (*self.lost, mx.base.MXNetError)

    def allreduce_array(self, array: Array, name: str) -> Array:
        """Return the elementwise sum over ranks."""
        sent = mx.nd.array(array, dtype=array.dtype)
        total: Array = self.hvd.allreduce(sent, average=False, name=name).asnumpy()
        return total

    def allgather_arrays(self, array: Array, name: str) -> Array:
        """Return the concatenated arrays of all ranks, by rank."""
        joined: Array = self.hvd.allgather(mx.nd.array(array, dtype=array.dtype), name=name).asnumpy()
        return joined
