"""Batches of a rank for ``model.fit``.

feed             stream of batches with sample weights
ShardedDataset   arrays, split over ranks
as_dataset       batches as a TensorFlow dataset that is not a generator
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_train.collectives.base import Communicator
from horovod_train.data.shard import PlannedStep
from horovod_train.frameworks.plain_data import Array
from horovod_train.frameworks.reader import Shards, batch_length


def feed(
    steps: Iterable[PlannedStep], spare: tuple[object, ...], *, accumulation_steps: int, world_size: int
) -> Iterator[tuple[object, ...]]:
    """Yield (inputs, labels, weights) for each micro-step.

    Keras reads the same number of micro-batches in every step, and averages their gradients. At the end of
    an epoch, a rank may have fewer samples. Sample weights correct the mean, and a rank without samples
    reads a spare batch with weight 0. Weights in full steps are 1.

    Keras applies the mean gradient over ranks and micro-steps. A micro-batch that contains the fraction s of
    the step's samples has the weight s x ranks x micro-steps, so that the mean is the sum of s x gradient.
    ``spare`` is the batch for micro-steps in which this rank has no samples.
    """
    for step in steps:
        for share, batch in step.padded(accumulation_steps, lambda: spare):
            yield weighted(batch, share * world_size * accumulation_steps)


def weighted(batch: tuple[object, ...], weight: float) -> tuple[object, ...]:
    """Return a batch with a weight for each sample, multiplied by the batch's own weights, if any.

    Own weights may have further dimensions, such as one weight for each token.
    """
    inputs, labels, own = (*batch, None)[:3]
    # Also if the weight is 1: all batches of a stream must have the same structure.
    weights = np.full(batch_length(labels), weight, np.float32)
    if own is not None:
        of_batch = np.asarray(own, np.float32)
        weights = weights.reshape(-1, *[1] * (of_batch.ndim - 1)) * of_batch
    return inputs, labels, weights


class ShardedDataset(keras.utils.PyDataset):
    """This rank's batches of arrays: each sample once per epoch, the same number of steps on all ranks.

    With ``model.fit(x, y)``, each rank trains on all samples. With slices of different lengths, ranks hang,
    because they perform different numbers of steps.

    Args:
        world: The communicator.
        x: Inputs, one row per sample; equal on all ranks.
        y: Labels.
        batch_size: Samples per rank and step.
        shuffle: Use a new order in each epoch.
        seed: Seed of the order.
    """

    def __init__(
        self, world: Communicator, x: Any, y: Any, *, batch_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        self._shards = Shards(world, x, y, batch_size=batch_size, shuffle=shuffle, seed=seed)
        self._epoch = 0

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return len(self._shards)

    def __getitem__(self, index: int) -> Any:
        """Return (inputs, labels, weights) of a step."""
        weight, batch = self._shards.batch(self._epoch, index)
        return weighted(batch, weight)

    def on_epoch_end(self) -> None:
        """Change to the order of the next epoch."""
        self._epoch += 1


NUM_LOOKED_AT = 2  # number of batches that are compared to find sizes that vary, as in Keras


@contextmanager
def open_dataset(batches: Iterator[tuple[object, ...]]) -> Iterator[tf.data.Dataset]:
    """Yield ``as_dataset(batches)``. After an exception, stop the threads that read ahead.

    When the interpreter exits, Python ends each other thread that needs the GIL, and the destructor of
    TensorFlow's iterator waits forever for that thread: the process does not exit. After an exception, the
    iterator is in a reference cycle with a generator of Keras: only the garbage collector destroys it, and
    only if no frame refers to it that the traceback keeps.
    """
    try:
        yield as_dataset(batches)
    except BaseException as error:
        _clear_frames(error)
        gc.collect()
        raise


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables of functions that an exception has ended.

    ``traceback.clear_frames`` does not suffice: Keras removes its frames from the traceback, but they are the
    callers of frames that remain in it.
    """
    for kept, _ in traceback.walk_tb(error.__traceback__):
        frame: FrameType | None = kept
        with suppress(RuntimeError):  # this function has not ended, nor have its callers
            while frame is not None:
                frame.clear()
                frame = frame.f_back


def as_dataset(batches: Iterator[tuple[object, ...]]) -> tf.data.Dataset:
    """Return a dataset that reads batches on demand: at least one nested structure of NumPy arrays.

    The dataset is not a generator: Keras converts a generator to ``Dataset.from_generator``. On Python 3.11
    and later, that operation changes a setting of glibc, permanently and for the whole process
    (``ApplyPython311MemoryPatch`` in TensorFlow 2.21): freed blocks above 128 KiB are returned to the
    system. Each tensor of each step then needs new memory pages. This made steps of the benchmark network
    1.2 times as long.

    If a dimension except the first varies, it must differ between the first two batches.
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

    # ``map`` cannot end a dataset: ``take_while`` ends it after the last batch.
    found = tf.data.Dataset.counter().map(read)
    return found.take_while(lambda has_batch, _: has_batch).map(lambda _, batch: batch)


def _spec(*arrays: Any) -> tf.TensorSpec:
    """Return the dtype and shape that an array has in all batches; sizes that vary are None."""
    shapes = [np.shape(array)[1:] for array in arrays]
    common = [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True)]
    return tf.TensorSpec([None, *common], np.asarray(arrays[0]).dtype)
