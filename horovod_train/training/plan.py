"""Plan of a rank's remaining steps in an epoch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from horovod_train.collectives.base import Communicator
from horovod_train.data.planned_step import PlannedStep, planned_steps
from horovod_train.data.shard import epoch_order, steps_of_epoch
from horovod_train.frameworks.base import Reader
from horovod_train.training.progress import Progress


def plan_epoch(
    ranks: Communicator,
    reader: Reader,
    progress: Progress,
    *,
    batch_size_per_rank: int,
    accumulation_steps: int,
    batch_size_at: Callable[[float], int],
    max_steps: int | None = None,
    equal_micro_batches: bool = False,
) -> list[PlannedStep]:
    """Return the remaining steps of the current epoch, at most ``max_steps``; None: no limit.

    The samples are distributed over ``ranks``. A step has ``batch_size_at(epochs passed)`` samples, in
    at most ``accumulation_steps`` micro-batches of at most ``batch_size_per_rank`` samples. With
    ``equal_micro_batches``, all ranks read the same number of micro-batches.
    """
    order = progress.order
    shares = steps_of_epoch(
        num_samples=order.num_samples,
        cursor=progress.cursor,
        batch_size_per_rank=batch_size_per_rank,
        accumulation_steps=accumulation_steps,
        rank=ranks.rank,
        size=ranks.size,
        equal_micro_batches=equal_micro_batches,
        batch_size_at=lambda cursor: batch_size_at(progress.epoch + cursor / order.num_samples),
    )
    places = epoch_order(order.num_samples, order.seed, progress.epoch, shuffle=order.shuffle)
    return planned_steps(
        islice(shares, max_steps), partial(reader.read, progress.epoch, places), progress.epoch
    )
