"""What one rank does in an epoch: its shares of the steps, and its batches in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from horovod_train.collectives.base import Communicator
from horovod_train.data.shard import StepShare, epoch_order, steps_of_epoch
from horovod_train.frameworks.base import Reader
from horovod_train.training.progress import Progress


def plan_epoch(
    world: Communicator,
    reader: Reader,
    progress: Progress,
    *,
    batch_size_per_rank: int,
    accumulation_steps: int,
) -> tuple[list[StepShare], Iterator[Any]]:
    """Return a rank's shares of the steps that the current epoch still has, and their batches."""
    order = progress.order
    shares = list(
        steps_of_epoch(
            num_samples=order.num_samples,
            cursor=progress.cursor,
            batch_size_per_rank=batch_size_per_rank,
            accumulation_steps=accumulation_steps,
            rank=world.rank,
            size=world.size,
        )
    )
    places = epoch_order(order.num_samples, order.seed, progress.epoch, shuffle=order.shuffle)
    micro_batches = [micro_batch for share in shares for micro_batch in share.micro_batches]
    return shares, reader.read(progress.epoch, places, micro_batches)
