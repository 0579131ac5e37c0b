"""Tasks: users' classes with the methods that the framework calls. No base class is required.

Every task has ``model()`` and ``train_data()``, and may have ``eval_data()``. The other methods depend on
whether the task computes the loss; the module ``task`` of each framework's package lists them.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from horovod_train.collectives.base import Communicator
from horovod_train.errors import UserError
from horovod_train.registry import TASKS, load_location

log = logging.getLogger(__name__)

OF_OTHER_PACKAGES = {
    "configure_optimizers": ["param_groups()", "the job's optimizer: and lr: are used"],
    "optimizer": ["param_groups()", "the job's optimizer: is used"],
    "scheduler": ["the job's lr: is used"],
    "lr_scheduler": ["the job's lr: is used"],
    "collate": ["the dataset's collate() is called"],
    "collate_fn": ["collate()", "the dataset's collate() is called"],
    "val_data": ["eval_data()"],
    "valid_data": ["eval_data()"],
    "validation_data": ["eval_data()"],
    "test_data": ["eval_data()"],
    "train_dataloader": ["train_data()"],
    "val_dataloader": ["eval_data()"],
    "training_step": ["loss()", "the module's training_step() is called"],
    "validation_step": ["metrics()", "the module's validation_step() is called"],
    "compute_metrics": ["metrics()"],
    "after_step": ["after_update()", "a job has no such hook"],
}
"""Names of methods in other packages, and what a job uses instead; the first that applies is reported."""


def load_task(location: str, args: Mapping[str, Any], required: Sequence[str]) -> Any:
    """Import a task's class, and create an instance with the keyword arguments ``args``.

    ``location`` is the name of a shipped task, ``module:Class`` or ``/path/file.py:Class``.

    Raises:
        UserError: The class cannot be imported, refuses the arguments, or lacks a method.
    """
    task_class = load_task_class(location)
    try:
        inspect.signature(task_class).bind(**args)
    except (TypeError, ValueError) as error:  # ValueError: a class without a signature
        raise UserError(
            f"task {location}: {error}", hint="task_args must fit the arguments of the task's class"
        ) from error
    task = task_class(**args)
    missing = [name for name in required if not callable(getattr(task, name, None))]
    if missing:
        raise UserError(
            f"task {location} lacks {', '.join(name + '()' for name in missing)}",
            hint=f"a task has {', '.join(name + '()' for name in required)}",
        )
    return task


def report_unused_methods(task: object, known: Sequence[str], world: Communicator) -> None:
    """Log the methods of a task that the job does not call although their names suggest it, on rank 0."""
    found = [
        f"{name}() ({instead})"
        for name in dir(type(task))
        if name not in known and (instead := _instead_of(name, task, known)) and callable(getattr(task, name))
    ]
    if found and world.rank == 0:
        log.warning("methods of %s that the job does not call: %s", type(task).__name__, "; ".join(found))


def _instead_of(name: str, task: object, known: Sequence[str]) -> str:
    """Return what a job uses instead of a method; empty: the name does not suggest that a job calls it."""
    if name in OF_OTHER_PACKAGES:
        candidates = OF_OTHER_PACKAGES[name]
        return next((each for each in candidates if not each.endswith("()") or each[:-2] in known), "")
    if name.startswith("on_"):
        return "a job has no such hook"
    near = get_close_matches(name, [each for each in known if not hasattr(task, each)], 1, cutoff=0.8)
    return f"did you mean {near[0]}()?" if near else ""


def load_task_class(location: str) -> Any:
    """Import a task's class; raise UserError if it cannot be imported."""
    return load_location(location, TASKS)


def check_is_one_number(shape: Sequence[int]) -> None:
    """Raise UserError if a loss is not one number: frameworks would sum it, or fail without a hint."""
    if math.prod(shape) != 1:
        raise UserError(
            f"the task's loss has shape {list(shape)}, but has to be one number",
            hint="return the mean over the samples of the batch",
        )
