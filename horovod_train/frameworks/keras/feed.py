"""Stream of batches with sample weights for ``model.fit``.

Keras reads the same number of micro-batches in every step, and averages their gradients. At the end of an
epoch, a rank may have fewer samples. Sample weights correct the mean, and a rank without samples reads a
spare batch with weight 0. Weights in full steps are 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from horovod_train.data.planned_step import PlannedStep
from horovod_train.frameworks.reader import batch_length


def feed(
    steps: Iterable[PlannedStep], spare: tuple[object, ...], *, accumulation_steps: int, world_size: int
) -> Iterator[tuple[object, ...]]:
    """Yield (inputs, labels, weights) for each micro-step.

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
