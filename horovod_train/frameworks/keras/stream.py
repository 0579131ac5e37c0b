"""Batches for ``model.fit`` on TensorFlow, as a dataset that is not a generator.

Keras makes a ``Dataset.from_generator`` of a generator. On Python 3.11 and later that operation lets
glibc give every block above 128 KiB back to the system when it is freed (``ApplyPython311MemoryPatch``
in TensorFlow 2.21), for the whole process and for ever: each tensor of each step is new memory then,
page by page. It made the steps of the benchmark network 1.2 times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_train.frameworks.arrays import Array

NUM_LOOKED_AT = 2  # batches by which sizes that vary are known, as in Keras


def as_dataset(batches: Iterator[tuple[object, ...]]) -> tf.data.Dataset:
    """Return a dataset that reads each batch on demand.

    Args:
        batches: NumPy arrays in any nest, at least one batch; dimensions but the first that vary must
            do so between the first two batches.
    """
    first = list(islice(batches, NUM_LOOKED_AT))
    specs = keras.tree.map_structure(_spec, *first)
    flat_specs = keras.tree.flatten(specs)
    source = chain(first, batches)

    def next_batch() -> list[Array | np.bool_]:
        batch = next(source, None)
        has_batch = batch is not None
        return [np.bool_(has_batch), *map(np.asarray, keras.tree.flatten(batch if has_batch else first[0]))]

    def read(_: tf.Tensor) -> tuple[tf.Tensor, Any]:
        has_batch, *arrays = tf.numpy_function(
            next_batch, [], [tf.bool, *(spec.dtype for spec in flat_specs)]
        )
        shaped = [tf.ensure_shape(array, spec.shape) for array, spec in zip(arrays, flat_specs, strict=True)]
        return tf.ensure_shape(has_batch, []), keras.tree.pack_sequence_as(specs, shaped)

    # A dataset cannot end while it reads: it ends at the first batch that is not there.
    found = tf.data.Dataset.counter().map(read)
    return found.take_while(lambda has_batch, _: has_batch).map(lambda _, batch: batch)


def _spec(*arrays: Any) -> tf.TensorSpec:
    """Return the type and shape that the same array has in all batches; None where a size varies."""
    shapes = [np.shape(array)[1:] for array in arrays]
    common = [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True)]
    return tf.TensorSpec([None, *common], np.asarray(arrays[0]).dtype)
