"""Creation of a job's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from horovod_train.config.schema import Job
from horovod_train.lr.optimizer_arguments import ArgumentScaling
from horovod_train.registry import optimizers_of


def make_optimizer(job: Job, num_data_ranks: int, make: Callable[[Any, Mapping[str, Any]], Any]) -> Any:
    """Create the job's optimizer.

    Args:
        job: The job description.
        num_data_ranks: Number of data-parallel ranks.
        make: Calls the class with the job's arguments and those that the framework adds.

    Raises:
        UserError: The optimizer is unknown, or its class refuses the arguments.
    """
    args, scaling = _with_tuples(job.optimizer.args), ArgumentScaling.of(job, num_data_ranks)
    return optimizers_of(job.framework).make(
        job.optimizer.name,
        lambda factory: make(factory, scaling.arguments(factory, args)),
        args_field="optimizer.args",
    )


def _with_tuples(args: Mapping[str, Any]) -> dict[str, Any]:
    """Replace lists by tuples, which optimizers require and YAML does not have (``betas: [0.9, 0.95]``)."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
