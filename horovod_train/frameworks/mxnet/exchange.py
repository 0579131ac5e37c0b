"""Sums of gradients over ranks, with MXNet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import mxnet as mx
import numpy as np

from horovod_train.frameworks import exchange
from horovod_train.frameworks.mxnet.collectives import MxnetCommunicator


class Exchange(exchange.Exchange):
    """Sums lists of MXNet arrays over ranks, in place.

    ``sum`` returns before the sums are available, as all operations of MXNet do; ``seconds`` is 0. Arrays are
    sent in their own types.
    """

    def kind(self, array: mx.nd.NDArray) -> type:
        """Return the data type."""
        dtype: type = array.dtype
        return dtype

    def size_on_wire_bytes(self, array: mx.nd.NDArray) -> int:
        """Return the size of an array."""
        return int(array.size * np.dtype(array.dtype).itemsize)

    def pack(self, arrays: Sequence[mx.nd.NDArray], kind: type) -> mx.nd.NDArray:
        """Return the array itself, or one flat array with the elements of several."""
        return mx.nd.concat(*[a.reshape(-1) for a in arrays], dim=0) if len(arrays) > 1 else arrays[0]

    def reduce(self, buckets: Iterable[mx.nd.NDArray], names: Iterable[str]) -> Iterator[mx.nd.NDArray]:
        """Yield each bucket, which Horovod sums in place; the first has the highest priority."""
        assert isinstance(self.world, MxnetCommunicator)
        for number, (bucket, name) in enumerate(zip(buckets, names, strict=False)):
            self.world.hvd.allreduce_(bucket, average=False, name=name, priority=-number)
            yield bucket

    def unpack(self, total: mx.nd.NDArray, arrays: Sequence[mx.nd.NDArray]) -> Sequence[mx.nd.NDArray]:
        """Write the parts of a summed bucket into its arrays, and return these."""
        ends = np.cumsum([array.size for array in arrays]).tolist()
        if len(arrays) > 1:
            for array, end in zip(arrays, ends, strict=True):
                array[:] = total[end - array.size : end].reshape(array.shape)
        return arrays


def to_arrays(batch: object, context: mx.Context) -> object:
    """Return a batch with NumPy arrays converted to MXNet arrays."""
    if isinstance(batch, np.ndarray):
        return mx.nd.array(batch, ctx=context, dtype=batch.dtype)
    if isinstance(batch, dict):
        return {key: to_arrays(value, context) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_arrays(value, context) for value in batch)
    return batch
