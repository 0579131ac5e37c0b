"""Properties of a job that its strategy declares."""

from __future__ import annotations

from horovod_train.config.axes import Axes
from horovod_train.config.schema import Job, Strategy
from horovod_train.config.support import strategy_support


def batch_size_of_lr(job: Job, num_data_ranks: int) -> int:
    """Return the batch size with which the learning rate scales: that of all ranks, or of one rank."""
    if not strategy_support(job.strategy.name).lr_follows_rank:
        return job.global_batch_size(num_data_ranks)
    return -(-job.global_batch_size(num_data_ranks) // num_data_ranks)


def axes_of(strategy: Strategy, world_size: int) -> Axes:
    """Return the axes of the ranks of a job.

    Raises:
        UserError: The strategy does not support this number of ranks.
    """
    support = strategy_support(strategy.name)
    if support.axes is None:
        return Axes(world_size)
    return support.axes(world_size, support.arguments_of(strategy.args))


def has_model_parallel_ranks(strategy: Strategy) -> bool:
    """Return whether the strategy has pipeline or tensor-parallel ranks, which read the same samples."""
    return strategy_support(strategy.name).axes is not None
