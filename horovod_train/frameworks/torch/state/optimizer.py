"""The PyTorch optimizer of a job (on a GPU in its fused form, if that is equivalent), and learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from horovod_train.config.schema import Job
from horovod_train.errors import HorovodTrainError, UserError
from horovod_train.frameworks.callbacks import GuardedLearningRate
from horovod_train.frameworks.optimizers import make_optimizer
from horovod_train.lr.optimizer_arguments import ArgumentScaling

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that have a fused form for GPUs."""


def optimizer_over(
    job: Job, parameters: Iterable[Any], num_data_ranks: int, *, may_fuse: bool = True
) -> torch.optim.Optimizer:
    """Create the job's optimizer.

    Args:
        job: The job.
        parameters: Parameters or parameter groups, in any form that PyTorch's optimizers accept.
        num_data_ranks: Number of data-parallel ranks, for arguments that follow the global batch.
        may_fuse: On a GPU, choose the fused form if the job does not specify the form.

    Raises:
        UserError: The optimizer is unknown, or its arguments are invalid.
    """
    scaling = ArgumentScaling.of(job, num_data_ranks)

    def converted(group: Mapping[str, Any]) -> dict[str, Any]:
        return scaling.scaled(_with_list(group, job.lr.base_lr))

    given = list(parameters)
    groups = [converted(group) if isinstance(group, dict) else group for group in given]

    def make(factory: Callable[..., Any], args: Mapping[str, Any]) -> Any:
        fused = {"fused": True} if may_fuse and is_fused_by_default(factory, args, groups) else {}
        return factory(groups, lr=job.lr.base_lr, **args, **fused)

    optimizer = make_optimizer(job, num_data_ranks, make)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer {job.optimizer.name!r} is a {type(optimizer).__name__}, not a torch optimizer"
        )
    for group in optimizer.param_groups:
        if (own := float(group.get("lr", job.lr.base_lr)) / job.lr.base_lr) != 1.0:
            # Some optimizers scale the rate in the constructor. The schedule, which sets it, must do so too.
            group["lr_scale"] = own * group.get("lr_scale", 1.0)
    if given and all(isinstance(group, dict) for group in given):
        optimizer.groups_of_task = GroupsOfTask(given, converted)  # type: ignore[attr-defined]
    return optimizer


PLAIN_SETTINGS = (bool, int, float, str, tuple)


class GroupsOfTask:
    """Parameter groups as the task made them: if it changes a setting later, the optimizer's group follows.

    PyTorch's optimizers use the dicts that they are given; those of a job have converted copies.

    Args:
        given: The task's groups.
        converted: Returns the group of the optimizer for one of the task.
    """

    def __init__(
        self, given: Sequence[dict[str, Any]], converted: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> None:
        self._given, self._converted = given, converted
        self._seen = [self._settings(group) for group in given]

    def apply_to(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set what the task has changed since the last call, in those groups that it has made."""
        for group, given, seen in zip(groups, self._given, self._seen, strict=False):
            now = self._settings(given)
            if all(value is seen.get(name) for name, value in now.items()):
                continue
            before, after = (self._converted({**each, "params": []}) for each in (seen, now))
            for name, value in after.items():
                old = before.get(name)
                if name == "params" or value is old or (isinstance(value, PLAIN_SETTINGS) and value == old):
                    continue
                if name == "lr_scale" and old:  # relative to what the constructor may have scaled
                    value = group.get("lr_scale", 1.0) * value / old  # noqa: PLW2901
                group[name] = value
            seen.update(now)

    @staticmethod
    def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in group.items() if name != "params"}


def is_fused_by_default(factory: object, args: Mapping[str, Any], groups: Iterable[Any]) -> bool:
    """Return whether the fused form is chosen because neither arguments nor groups specify the form.

    The fused form runs one kernel instead of several per parameter, and can skip a step on the device, except
    with dampening (see ``update.py``).
    """
    if factory not in FUSED or {"fused", "foreach", "capturable", "differentiable"} & args.keys():
        return False
    parameters: list[Any] = []
    for group in groups:
        settings = group if isinstance(group, dict) else {"params": [group]}
        if {"fused", "foreach"} & settings.keys() or settings.get("dampening"):
            return False
        # A parameter, or a tuple of its name and the parameter.
        parameters += [entry[1] if isinstance(entry, tuple) else entry for entry in settings["params"]]
    has_kernels = all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameters)
    return bool(parameters) and has_kernels and not args.get("dampening")


def clone_optimizer(
    optimizer: torch.optim.Optimizer, param_groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class over other parameter groups, without state.

    ``copy.copy`` would lose attributes of the class other than groups, state and defaults.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups, twin.state = param_groups, type(optimizer.state)(dict)
    return twin


def explain_closure(error: Exception, job: Job) -> HorovodTrainError | None:
    """Return the ``UserError`` of an optimizer that needs more than gradients; None: another cause."""
    wants_closure = "closure" in f"{type(error).__name__} {error}".lower()
    if isinstance(error, HorovodTrainError) or not (wants_closure or "does not require grad" in str(error)):
        return None
    return UserError(
        f"the optimizer {job.optimizer.name} requires a closure or second derivatives, and a job "
        f"provides only gradients: {error}",
        hint="use an optimizer that requires only gradients, or your own training loop (docs/own-loop.md)",
    )


def set_rates(optimizer: torch.optim.Optimizer, lr: float, rounded: Callable[[float], float]) -> None:
    """Set the learning rate of each group to ``lr`` times the group's ``lr_scale``, passed to ``rounded``."""
    groups_of_task: GroupsOfTask | None = getattr(optimizer, "groups_of_task", None)
    if groups_of_task is not None:
        groups_of_task.apply_to(optimizer.param_groups)
    for group, rate in zip(optimizer.param_groups, rates_of_groups(optimizer, lr), strict=True):
        group["lr"] = rounded(rate)


BETAS = {"beta1": 0, "beta2": 1}
"""Names of the elements of ``betas`` in ``optimizer.schedules``."""


class ScheduledArguments:
    """Arguments of an optimizer that follow schedules, such as ``momentum`` and ``beta1``.

    A parameter group with its own value keeps the ratio of this value to the optimizer's default. If the
    default is 0, or the argument is one of ``betas``, such a group keeps its value.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    def set(self, values: Mapping[str, float]) -> None:
        """Set the values of the next step.

        Raises:
            UserError: The optimizer has no such argument.
        """
        defaults = self._optimizer.defaults
        for name, value in values.items():
            key = "betas" if name in BETAS else name
            if key not in defaults:
                raise UserError(
                    f"optimizer.schedules.{name}: {type(self._optimizer).__name__} has no such argument",
                    hint=f"its arguments are {', '.join(sorted(defaults))}",
                )
            for group, own in zip(self._optimizer.param_groups, self._own, strict=True):
                if own[key] == defaults[key]:
                    group[key] = self._replaced(group[key], name, value)
                elif name not in BETAS and defaults[key]:
                    group[key] = value * own[key] / defaults[key]

    @staticmethod
    def _replaced(before: Any, name: str, value: float) -> Any:
        if name not in BETAS:
            return value
        return tuple(value if at == BETAS[name] else beta for at, beta in enumerate(before))


def rates_of_groups(optimizer: torch.optim.Optimizer, lr: float) -> list[float]:
    """Return the learning rate of each group of an optimizer, given the job's rate."""
    return [lr * group.get("lr_scale", 1.0) for group in optimizer.param_groups]


class GroupRates(GuardedLearningRate):
    """Learning rates of an optimizer's groups, relative to the job's rate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # ``param_groups`` is read in each call, because ``load_state_dict`` replaces the groups.
        super().__init__(lambda: [float(group["lr"]) for group in optimizer.param_groups], self._write)
        self._optimizer = optimizer

    def set_job_rate(self, lr: float) -> None:
        """Set the rates of the next step; raise ``UserError`` if other code has changed the last rates."""
        self.set(rates_of_groups(self._optimizer, lr))

    def _write(self, rates: list[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _with_list(group: Mapping[str, Any], base_lr: float) -> dict[str, Any]:
    """Return a group with a list of parameters instead of a generator, and ``lr_scale`` instead of ``lr``.

    A group's ``lr`` is its rate at ``lr.base_lr``; the schedule scales both by the same factor.
    """
    found = group["params"]
    own = {**group, "params": [found] if isinstance(found, torch.Tensor) else list(found)}
    if "lr" in group:
        own["lr_scale"] = float(group["lr"]) / base_lr * own.get("lr_scale", 1.0)
        del own["lr"]
    return own
