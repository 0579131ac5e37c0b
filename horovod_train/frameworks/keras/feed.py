"""The shard rule as ``model.fit`` can read it: one stream of batches of equal number per step.

Keras takes the same number of micro-batches in every step and the mean of their gradients. Where the
rule gives a rank fewer samples (at the end of an epoch), batches carry weights, and a rank without
samples reads one that weighs nothing. Full steps have no weights at all.
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

    The gradient that Keras applies is the mean over ranks and micro-steps; a micro-batch of a share
    s of the step's samples weighs s x ranks x micro-steps, so that mean is the sum of s x gradient.

    Args:
        steps: What to make.
        spare: A batch to read where there is none.
        accumulation_steps: Micro-steps per step.
        world_size: Ranks.
    """
    for step in steps:
        for share, batch in step.padded(accumulation_steps, lambda: spare):
            yield weighted(batch, share * world_size * accumulation_steps)


def weighted(batch: tuple[object, ...], weight: float) -> tuple[object, ...]:
    """Return a batch with a weight for each sample, times those that it has already."""
    inputs, labels, own = (*batch, None)[:3]
    # Always there: a stream must not change its shape.
    weights = np.full(batch_length(labels), weight, np.float32)
    return inputs, labels, weights if own is None else weights * np.asarray(own, np.float32)
