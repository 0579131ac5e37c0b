"""Sum gradients over ranks inside a TensorFlow graph.

Gradients are joined into flat buckets and each bucket is one all-reduce. In a graph an operation runs
as soon as its inputs are there, so a bucket leaves while backward still makes the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from horovod_train.collectives.base import Communicator
from horovod_train.frameworks.buckets import plan_buckets
from horovod_train.frameworks.tensorflow.collectives import TensorflowCommunicator

NARROW = (tf.bfloat16, tf.float16)  # summed in 32 bits: Horovod knows no bfloat16, and fp16 overflows


@dataclass
class Exchange:
    """Sums lists of tensors over ranks.

    Args:
        world: The ranks.
        bucket_size_bytes: About how much travels in one piece.
        wire_dtype: Type of 32-bit tensors on the way: float32 or float16.

    Attributes:
        seconds: 0, because waiting cannot be measured inside of a graph.
    """

    world: Communicator
    bucket_size_bytes: int = 8 * 2**20
    wire_dtype: tf.DType = tf.float32
    seconds: float = field(default=0.0, init=False)

    def sum(self, tensors: Sequence[tf.Tensor], name: str = "gradients") -> list[tf.Tensor]:
        """Return the elementwise sums over ranks, in the types and shapes of the tensors.

        Every rank calls it with tensors of the same shapes in the same order; in a graph or outside.
        The slices of an embedding's gradient become dense.

        Constants of a graph must not be among them: TensorFlow computes what depends on constants only
        once, when it optimizes the graph, and other ranks would wait for the second time for ever.

        Args:
            tensors: Of floating-point types.
            name: Tells this exchange from others; the same on all ranks.
        """
        arrays = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if self.world.size == 1:
            return arrays
        assert isinstance(self.world, TensorflowCommunicator)
        hvd = self.world.hvd
        kinds = [self._type_on_wire(array.dtype) for array in arrays]
        lengths = [int(array.shape.num_elements()) for array in arrays]
        sizes = [length * kind.size for length, kind in zip(lengths, kinds, strict=True)]
        sums = dict[int, tf.Tensor]()
        for number, places in enumerate(plan_buckets(kinds, sizes, self.bucket_size_bytes)):
            pieces = [tf.reshape(tf.cast(arrays[place], kinds[place]), [-1]) for place in places]
            total = hvd.allreduce(
                tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0],
                op=hvd.Sum,
                name=f"horovod_train.{name}.{number}",
                # The name must be the same in every graph that calls this, on every rank.
                ignore_name_scope=True,
            )
            parts = tf.split(total, [lengths[p] for p in places]) if len(places) > 1 else [total]
            for place, piece in zip(places, parts, strict=True):
                sums[place] = tf.cast(tf.reshape(piece, arrays[place].shape), arrays[place].dtype)
        return [sums[place] for place in range(len(arrays))]

    def mean(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the elementwise means over ranks; otherwise as ``sum``."""
        return [total / self.world.size for total in self.sum(tensors)]

    def bytes_on_wire(self, tensors: Sequence[tf.Tensor]) -> int:
        """Return how many bytes a rank gives away when such tensors are summed."""
        if self.world.size == 1:
            return 0
        return sum(int(t.shape.num_elements()) * self._type_on_wire(t.dtype).size for t in tensors)

    def _type_on_wire(self, dtype: tf.DType) -> tf.DType:
        if dtype in NARROW:
            return tf.float32
        return self.wire_dtype if dtype == tf.float32 else dtype
