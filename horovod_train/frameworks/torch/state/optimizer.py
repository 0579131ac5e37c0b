"""The PyTorch optimizer of a job, its learning rates, and how its state is split.

optimizer_over       the job's optimizer (on a GPU in its fused form, if that is equivalent)
GroupRates           learning rates of an optimizer's groups, relative to the job's rate
ScheduledArguments   arguments that follow schedules, such as ``momentum``
check_elementwise    refuses an optimizer that does not update each element independently: with others,
                     a rank cannot update a slice of a weight
move_state           copies the state of a parameter to a slice of it
Lamb                 the optimizer LAMB
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from horovod_train.config.schema import Job
from horovod_train.errors import HorovodTrainError, UserError, translated
from horovod_train.frameworks.base import make_optimizer
from horovod_train.frameworks.callbacks import GuardedLearningRate
from horovod_train.lr.policy import ArgumentScaling

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
    with dampening (see ``step/update.py``).
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


KNOWN = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Rprop),
)
"""Optimizers of PyTorch that are elementwise: no trial is needed."""
MATRIX_OPTIMIZERS = ("ScalableShampoo", "Shampoo", "SOAP", "GaLore", "Fira", "Muon")
"""Optimizers that use whole matrices only after many steps or with some settings, which a trial may miss."""
REDUCTIONS = (
    *("sum", "mean", "norm", "linalg_vector_norm", "_foreach_norm", "max", "min", "amax", "amin", "aminmax"),
    *("std", "var", "var_mean", "std_mean", "median", "dot", "vdot", "mm", "mv", "addmm", "prod", "cumsum"),
    *("sort", "topk", "argmax", "argmin"),
)
"""Operations that combine elements of a tensor."""
JOINS = ("stack", "cat")
"""Operations that combine several tensors."""
_WATCHED_STEPS, _INTERVAL_STEPS = 32, 61
"""The first steps are watched, and then one in so many: watching slows operations down."""
_SHAPE = (6, 4)
_CUTS = (0, 9, 24)  # boundaries of the slices of a flat weight of 24 elements, one slice per rank
_LR = 0.05
"""Learning rate of trials: the job's rate may be too small for visible differences."""
_HINT = "use sgd, adam or adamw, or strategy: allreduce"


@torch.no_grad()
def check_elementwise(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Raise ``UserError`` if an optimizer's update of an element depends on other elements, or a trial fails.

    The optimizer is tried on a small weight, cut into two slices, with the settings of each parameter group.
    The gradients of the trial reveal dependencies: some are much larger or smaller than the previous
    gradients, zero in one slice, or orthogonal or parallel to the weight.

    Args:
        optimizer: The optimizer. Its parameters and state are not changed.
        strategy: Name of the strategy, for error messages.
    """
    on = "others of the same weight, which other ranks have"
    _check_equivalent(optimizer, strategy, "split", _pieces, on)
    _watch(optimizer, (*REDUCTIONS, *JOINS), lambda name: _refused(strategy, name, "split", on))


@torch.no_grad()
def check_separable(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Raise ``UserError`` if an optimizer's update of a weight depends on other weights, or a trial fails.

    Other ranks update the other weights. The arguments are those of ``check_elementwise``.
    """
    on = "other weights, which other ranks have"
    _check_equivalent(optimizer, strategy, "spread over ranks", _halves, on)
    _watch(optimizer, JOINS, lambda name: _refused(strategy, name, "spread over ranks", on))


def _watch(
    optimizer: torch.optim.Optimizer, names: Collection[str], refusal: Callable[[str], UserError]
) -> None:
    """Let a step raise the refusal if it combines elements by one of the operations.

    An optimizer may do so late, or only compare a norm with a limit that a trial does not reach.
    """
    if type(optimizer) in KNOWN:
        return
    operations = _Operations(names)
    num_steps = depth = 0  # PyTorch calls hooks also of the step of a base class, within that of its subclass

    def before(*_: object) -> None:
        nonlocal num_steps, depth
        depth += 1
        if depth > 1:
            return
        num_steps += 1
        if num_steps <= _WATCHED_STEPS or num_steps % _INTERVAL_STEPS == 0:
            operations.__enter__()

    def after(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth:
            return
        if operations.is_active:
            operations.__exit__(None, None, None)
        if operations.found:
            error = refusal(type(optimizer).__name__)
            raise UserError(f"{error.message} (its step computes {operations.found})", hint=error.hint)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records an operation of some names on floating-point tensors of several elements."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.found = ""
        self.is_active = False

    def __enter__(self) -> Self:
        self.is_active = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_active = False
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        name = func._schema.name.partition("::")[2]  # noqa: SLF001
        if name in self._names:
            inputs = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
            tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
            if any(each.is_floating_point() and (each.numel() > 1 or len(tensors) > 1) for each in tensors):
                self.found = self.found or name
        return func(*args, **(kwargs or {}))


def _check_equivalent(
    optimizer: torch.optim.Optimizer,
    strategy: str,
    what: str,
    cut: Callable[[torch.Tensor], list[torch.Tensor]],
    on: str,
) -> None:
    """Raise ``UserError`` if one optimizer of a weight and one per part of it compute different weights."""
    name = type(optimizer).__name__
    if type(optimizer) in KNOWN:
        return
    estimates_rate = any("d0" in group for group in optimizer.param_groups)  # D-Adaptation, from all weights
    if estimates_rate or name in MATRIX_OPTIMIZERS:
        raise _refused(strategy, name, what, on)
    for settings in _settings(optimizer):
        with translated(
            lambda error: UserError(
                f"strategy {strategy}: the optimizer {name} cannot be {what}: "
                f"{type(error).__name__}: {error}",
                hint=_HINT,
            )
        ):
            whole, apart, have_same_numbers = _updated(optimizer, settings, cut)
        if not have_same_numbers or not torch.allclose(whole, apart, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise _refused(strategy, name, what, on)


def _refused(strategy: str, name: str, what: str, on: str) -> UserError:
    return UserError(
        f"strategy {strategy}: the optimizer {name} cannot be {what}: the update of an element "
        f"depends on {on}",
        hint=_HINT,
    )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the distinct settings of all groups."""
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = {key: value for key, value in group.items() if key not in {"params", "lr", "lr_scale"}}
        if repr(own) not in map(repr, found):
            found.append(own)
    return found


def _pieces(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the slices of a flat weight, one per rank."""
    flat = weight.reshape(-1)
    return [flat[first:last].clone() for first, last in pairwise(_CUTS)]


def _halves(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return two weights, one per rank."""
    return [half.clone() for half in weight.chunk(2)]


def _updated(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    cut: Callable[[torch.Tensor], list[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return the weights after all steps: of one optimizer, and of one per part; and whether scalars agree.

    Scalars of settings and state are compared, such as an estimate of the learning rate.
    """
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    make = torch.Generator().manual_seed(0)
    weight = torch.randn(_SHAPE, generator=make, dtype=torch.float64)
    joined = cut is _halves  # parts are whole weights, all of which the single optimizer updates
    of_whole = [torch.nn.Parameter(each.to(device)) for each in (cut(weight) if joined else [weight.clone()])]
    of_parts = [torch.nn.Parameter(each.to(device)) for each in cut(weight)]
    whole = _cloned(optimizer, settings, of_whole)
    parts = [_cloned(optimizer, settings, [parameter]) for parameter in of_parts]
    same = True
    after: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for gradient in _gradients(weight, make):
        pieces = cut(gradient)
        for parameter, piece in zip(of_whole, pieces if joined else [gradient], strict=True):
            parameter.grad = piece.clone().to(device)
        for parameter, piece in zip(of_parts, pieces, strict=True):
            parameter.grad = piece.clone().to(device)
        for each in (whole, *parts):
            each.step()
        for found, parameters in zip(after, (of_whole, of_parts), strict=True):
            found.append(torch.cat([parameter.detach().flatten() for parameter in parameters]).cpu())
        same = same and all(_numbers(each) == _numbers(whole) for each in parts)
    return torch.cat(after[0]), torch.cat(after[1]), same


def _numbers(optimizer: torch.optim.Optimizer) -> object:
    """Return the scalars in the settings and the state of an optimizer, as text."""
    (group,) = optimizer.param_groups
    settings = {key: _number(value) for key, value in group.items() if key != "params"}
    of_parameters = [
        optimizer.state[parameter] for parameter in group["params"] if parameter in optimizer.state
    ]
    own = [
        sorted((key, _number(value)) for key, value in state.items() if _number(value) is not None)
        for state in of_parameters
    ]
    others = {
        key: _number(value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)
    }
    return repr((settings, sorted(map(repr, own))[:1], others))


def _number(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return round(float(value), 12) if value.numel() == 1 and not value.is_complex() else None
    return (
        round(value, 12)
        if isinstance(value, float)
        else value
        if isinstance(value, bool | int | str)
        else None
    )


def _gradients(weight: torch.Tensor, make: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield gradients of different kinds, one per step."""

    def random(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(_SHAPE, generator=make, dtype=torch.float64)

    yield random()
    yield random()
    yield random(30.0)  # a spike in all elements
    yield random(1e-3)
    spike = random()
    spike[0] *= 100.0  # a spike in some elements
    yield spike
    yield weight * 0.3
    across = random()
    yield across - weight * (across * weight).sum() / weight.square().sum()
    half = random()
    half.view(-1)[: _CUTS[1]] = 0.0
    yield half
    yield torch.zeros(_SHAPE, dtype=torch.float64)
    drift = random()
    for _ in range(20):
        yield drift + random(0.1)
    yield random(10.0)
    yield random(1e-6)
    for _ in range(6):
        yield random()


def _cloned(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return a clone of an optimizer over other parameters, without hooks."""
    group = {**copy.deepcopy(dict(settings)), "params": list(parameters), "lr": _LR}
    twin = clone_optimizer(optimizer, [group])
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = {}
    first = optimizer.param_groups[0]["params"][0]
    for parameter in parameters:
        if first in optimizer.state:  # some optimizers create their state in the constructor
            twin.state[parameter] = {
                key: _like(value, first, parameter) for key, value in optimizer.state[first].items()
            }
    if callable(switch := getattr(twin, "train", None)):
        switch()
    return twin


def _like(value: Any, of: torch.Tensor, parameter: torch.Tensor) -> Any:
    """Convert a value of the initial state of one parameter to the shape of another parameter."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.shape != of.shape or not value.numel():
        return value.clone()
    return torch.full_like(parameter, float(value.flatten()[0]))


def move_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, piece: torch.nn.Parameter, start: int
) -> None:
    """Copy the optimizer's state of a parameter, if there is any, to a slice of the parameter.

    Args:
        optimizer: The optimizer, which has the state of ``parameter``.
        parameter: The whole parameter.
        piece: Flat slice of the parameter.
        start: Index of the first element of the slice in the flat parameter.
    """
    if parameter not in optimizer.state:
        return
    optimizer.state[piece] = {
        key: value.reshape(-1)[start : start + piece.numel()].clone()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        else value.clone()
        if isinstance(value, torch.Tensor)
        else value
        for key, value in optimizer.state[parameter].items()
    }


class Lamb(torch.optim.Optimizer):
    """The optimizer LAMB.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Weight decay, inside of the trust ratio.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {betas}")
        if eps < 0 or weight_decay < 0:
            raise ValueError(f"eps and weight_decay must be at least 0, not {eps} and {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform an update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2) = self.state[parameter], group["betas"]
        weight, gradient = _real(parameter), _real(parameter.grad)
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        # A checkpoint of a former version has the number of steps in its group.
        step = state["step"] = state.get("step", torch.tensor(float(group.get("step", 0)))) + 1
        mean = state["exp_avg"].lerp_(gradient, 1 - b1)
        square = state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        root = (square / (1 - b2**step)).sqrt_().add_(group["eps"])
        update = (mean / (1 - b1**step)).div_(root).add_(weight, alpha=group["weight_decay"])
        ratio = weight.norm() / update.norm()
        ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
        weight.sub_(update.mul_(ratio * group["lr"]))


def _real(tensor: Any) -> torch.Tensor:
    """Return a tensor, or the pairs of real and imaginary parts of a complex one, which share its memory."""
    detached: torch.Tensor = tensor.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached
