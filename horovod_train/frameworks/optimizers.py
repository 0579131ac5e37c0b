"""The optimizer of a job, from the framework's table or by import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from horovod_train.config.schema import Job
from horovod_train.registry import optimizers_of


def make_optimizer(job: Job, make: Callable[[Any, Mapping[str, Any]], Any]) -> Any:
    """Return the job's optimizer.

    Args:
        job: Names it and its arguments.
        make: Calls the class with the arguments, and with what else the framework gives to it.

    Raises:
        UserError: Unknown optimizer, or invalid arguments.
    """
    args = _with_tuples(job.optimizer.args)
    return optimizers_of(job.framework).make(
        job.optimizer.name, lambda factory: make(factory, args), args_field="optimizer.args"
    )


def _with_tuples(args: Mapping[str, Any]) -> dict[str, Any]:
    """YAML has lists where optimizers want tuples, as in ``betas: [0.9, 0.95]``."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
