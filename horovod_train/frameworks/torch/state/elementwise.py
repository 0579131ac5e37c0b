"""Elementwise optimizers: each element is updated independently, so a rank can update a slice of a weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from horovod_train.errors import UserError, translated
from horovod_train.frameworks.torch.state.optimizer import clone_optimizer

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
