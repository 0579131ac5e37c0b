"""The optimizer of a job in PyTorch; on a GPU the fused one, where there is one that does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from horovod_train.config.schema import Job
from horovod_train.errors import HorovodTrainError, UserError
from horovod_train.frameworks.callbacks import JobsLearningRate
from horovod_train.frameworks.optimizers import make_optimizer

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Have a fused form for GPUs."""


def optimizer_over(job: Job, parameters: Iterable[Any], *, may_fuse: bool = True) -> torch.optim.Optimizer:
    """Return the job's optimizer over parameters or groups of them.

    Args:
        job: Names it.
        parameters: As optimizers take them.
        may_fuse: On a GPU, choose the fused form where the job does not say.

    Raises:
        UserError: Unknown optimizer, or invalid arguments.
    """
    groups = [_with_list(group, job.lr.base_lr) if isinstance(group, dict) else group for group in parameters]

    def make(factory: Callable[..., Any], args: Mapping[str, Any]) -> Any:
        fused = {"fused": True} if may_fuse and is_fused_by_itself(factory, args, groups) else {}
        return factory(groups, lr=job.lr.base_lr, **args, **fused)

    optimizer = make_optimizer(job, make)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer {job.optimizer.name!r} is a {type(optimizer).__name__}, not a torch optimizer"
        )
    for group in optimizer.param_groups:
        if (own := float(group.get("lr", job.lr.base_lr)) / job.lr.base_lr) != 1.0:
            # Some divide the rate that they are given; the schedule sets it in each step.
            group["lr_scale"] = own * group.get("lr_scale", 1.0)
    return optimizer


def is_fused_by_itself(factory: object, args: Mapping[str, Any], groups: Iterable[Any]) -> bool:
    """Return whether the fused form is the default.

    It performs the same update in one kernel instead of several per parameter, and can skip a step on the
    device, except with dampening (see ``update.py``).
    """
    if factory not in FUSED or {"fused", "foreach", "capturable", "differentiable"} & args.keys():
        return False
    parameters: list[Any] = []
    for group in groups:
        settings = group if isinstance(group, dict) else {"params": [group]}
        if {"fused", "foreach"} & settings.keys() or settings.get("dampening"):
            return False
        # A parameter, or its name with it.
        parameters += [entry[1] if isinstance(entry, tuple) else entry for entry in settings["params"]]
    has_kernels = all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameters)
    return bool(parameters) and has_kernels and not args.get("dampening")


def clone_optimizer(
    optimizer: torch.optim.Optimizer, param_groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind over other groups of parameters, without a state.

    ``copy`` would lose what a class has besides groups, state and defaults.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups, twin.state = param_groups, type(optimizer.state)(dict)
    return twin


def explain_closure(error: Exception, job: Job) -> HorovodTrainError | None:
    """Return our error of an optimizer that needs more than gradients; None: the error has another reason."""
    wants_closure = "closure" in f"{type(error).__name__} {error}".lower()
    if isinstance(error, HorovodTrainError) or not (wants_closure or "does not require grad" in str(error)):
        return None
    return UserError(
        f"the optimizer {job.optimizer.name} wants a closure, or second derivatives, in its step, and a job "
        f"gives it gradients: {error}",
        hint="use an optimizer that needs gradients alone, or a loop of your own (docs/own-loop.md)",
    )


def set_rates(optimizer: torch.optim.Optimizer, lr: float, rounded: Callable[[float], float]) -> None:
    """Set the learning rate of each group: ``lr``, times the group's ``lr_scale``."""
    for group, rate in zip(optimizer.param_groups, rates_of_groups(optimizer, lr), strict=True):
        group["lr"] = rounded(rate)


def rates_of_groups(optimizer: torch.optim.Optimizer, lr: float) -> list[float]:
    """Return the learning rate of each group of an optimizer, from the job's."""
    return [lr * group.get("lr_scale", 1.0) for group in optimizer.param_groups]


class GroupRates(JobsLearningRate):
    """The learning rates of an optimizer's groups, each relative to the job's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # ``load_state_dict`` makes new groups: they are looked up each time.
        super().__init__(lambda: [float(group["lr"]) for group in optimizer.param_groups], self._write)
        self._optimizer = optimizer

    def set_job_rate(self, lr: float) -> None:
        """Set the rates of the next step.

        Raises:
            UserError: Other code has set other rates.
        """
        self.set(rates_of_groups(self._optimizer, lr))

    def _write(self, rates: list[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _with_list(group: Mapping[str, Any], base_lr: float) -> dict[str, Any]:
    """Return a group that can be looked at more than once: its parameters may come from a generator.

    The ``lr`` of a group is its rate at ``lr.base_lr``: the group's rate follows the schedule by the same
    factor.
    """
    found = group["params"]
    own = {**group, "params": [found] if isinstance(found, torch.Tensor) else list(found)}
    if "lr" in group:
        own["lr_scale"] = float(group["lr"]) / base_lr * own.get("lr_scale", 1.0)
        del own["lr"]
    return own
