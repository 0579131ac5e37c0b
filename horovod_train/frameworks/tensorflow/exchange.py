"""Sums of gradients over ranks in a TensorFlow graph.

Each bucket is one all-reduce. TensorFlow runs an operation of a graph as soon as its inputs are available: a
bucket is sent while the backward pass computes the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from horovod_train.frameworks import exchange
from horovod_train.frameworks.tensorflow.collectives import TensorflowCommunicator

NARROW = (tf.bfloat16, tf.float16)  # summed in float32: Horovod has no bfloat16, and fp16 overflows


class Exchange(exchange.Exchange):
    """Sums lists of TensorFlow tensors over ranks, in a graph or eagerly.

    Do not pass constants of a graph: TensorFlow folds operations on constants when it optimizes the graph,
    so their collective would run on one rank and not on others.

    ``seconds`` is 0: waiting cannot be measured in a graph.
    """

    def dense(self, array: tf.Tensor) -> tf.Tensor:
        """Return a dense tensor: the gradient of an embedding is ``IndexedSlices``."""
        return tf.convert_to_tensor(array)

    def kind(self, array: tf.Tensor) -> tf.DType:
        """Return the wire dtype."""
        if array.dtype in NARROW:
            return tf.float32
        return (self.wire_dtype or tf.float32) if array.dtype == tf.float32 else array.dtype

    def size_on_wire_bytes(self, array: tf.Tensor) -> int:
        """Return the size of a tensor in its wire dtype."""
        return int(array.shape.num_elements()) * int(self.kind(array).size)

    def pack(self, arrays: Sequence[tf.Tensor], kind: tf.DType) -> tf.Tensor:
        """Return one flat tensor in the wire dtype with the elements of all tensors."""
        flat = [tf.reshape(tf.cast(array, kind), [-1]) for array in arrays]
        return tf.concat(flat, 0) if len(flat) > 1 else flat[0]

    def reduce(self, buckets: Iterable[tf.Tensor], names: Iterable[str]) -> Iterator[tf.Tensor]:
        """Yield the sum of each bucket over ranks."""
        assert isinstance(self.world, TensorflowCommunicator)
        hvd = self.world.hvd
        for bucket, name in zip(buckets, names, strict=False):
            # The name must be equal in all graphs that contain this operation, on all ranks.
            yield hvd.allreduce(bucket, op=hvd.Sum, name=name, ignore_name_scope=True)

    def unpack(self, total: tf.Tensor, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the parts of a summed bucket in the types and shapes of its tensors."""
        lengths = [int(array.shape.num_elements()) for array in arrays]
        parts = tf.split(total, lengths) if len(arrays) > 1 else [total]
        return [tf.cast(tf.reshape(p, a.shape), a.dtype) for p, a in zip(parts, arrays, strict=True)]
