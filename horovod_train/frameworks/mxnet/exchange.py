"""The sum of gradients over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mxnet as mx
import numpy as np

from horovod_train.collectives.base import Communicator
from horovod_train.frameworks.buckets import plan_buckets
from horovod_train.frameworks.mxnet.collectives import MxnetCommunicator


@dataclass(frozen=True)
class Exchange:
    """Sums arrays over ranks, in place.

    Args:
        world: The ranks.
        bucket_size_bytes: About how much travels in one piece.
    """

    world: Communicator
    bucket_size_bytes: int = 8 * 2**20

    def sum(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Replace arrays by their sums; returns before they are there, as everything in MXNet does.

        Every rank calls it with arrays of the same shapes in the same order.
        """
        if self.world.size == 1:
            return
        assert isinstance(self.world, MxnetCommunicator)
        hvd = self.world.hvd
        kinds = [array.dtype for array in arrays]
        plan = plan_buckets(kinds, [size_bytes(array) for array in arrays], self.bucket_size_bytes)
        for number, places in enumerate(plan):
            name = f"horovod_train.gradients.{number}"
            if len(places) == 1:
                hvd.allreduce_(arrays[places[0]], average=False, name=name, priority=-number)
                continue
            bucket = mx.nd.concat(*[arrays[place].reshape(-1) for place in places], dim=0)
            hvd.allreduce_(bucket, average=False, name=name, priority=-number)
            at = 0
            for place in places:
                array = arrays[place]
                array[:] = bucket[at : at + array.size].reshape(array.shape)
                at += array.size


def size_bytes(array: mx.nd.NDArray) -> int:
    """Return the size of an array in bytes."""
    return int(array.size * np.dtype(array.dtype).itemsize)


def to_arrays(batch: object, context: mx.Context) -> object:
    """Return a batch with MXNet's arrays in place of NumPy's."""
    if isinstance(batch, np.ndarray):
        return mx.nd.array(batch, ctx=context, dtype=batch.dtype)
    if isinstance(batch, dict):
        return {key: to_arrays(value, context) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_arrays(value, context) for value in batch)
    return batch
