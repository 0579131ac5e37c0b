"""Which device is a rank's own."""

from __future__ import annotations

from horovod_train.config.schema import Job
from horovod_train.engine.base import World
from horovod_train.errors import UserError


def own_gpu(job: Job, world: World, num_gpus: int) -> int | None:
    """Return the number of the rank's own GPU on its host; None: the rank computes on the CPU.

    Args:
        job: Says which device is wanted.
        world: The ranks.
        num_gpus: How many GPUs the framework has found on this host.

    Raises:
        UserError: A GPU was asked for and there is none for this rank.
    """
    if job.train.device == "cpu" or (job.train.device == "auto" and not num_gpus):
        return None
    if world.local_rank >= num_gpus:
        raise UserError(
            f"local rank {world.local_rank} on {world.host} has no GPU of its own: {num_gpus} found",
            hint="start at most one rank per GPU, or set train.device: cpu",
        )
    return world.local_rank
