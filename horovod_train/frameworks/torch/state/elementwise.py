"""Optimizers that update each number by itself, so that a rank can update some numbers of a weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from horovod_train.errors import UserError, translated
from horovod_train.frameworks.torch.state.optimizer import clone_optimizer

KNOWN = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Rprop),
)
"""PyTorch's own that update each number by itself: there is nothing to try."""
MATRIX_OPTIMIZERS = ("ScalableShampoo", "Shampoo", "SOAP", "GaLore", "Fira", "Muon")
"""Look at whole matrices after many steps, or with some settings: a trial may not see it."""
_SHAPE = (6, 4)
_CUTS = (0, 9, 24)  # of a weight of that many numbers; each piece is on its own rank
_LR = 0.05
"""Its own rate: that of a job may be too small to see anything."""
_HINT = "use sgd, adam or adamw, or strategy: allreduce"


@torch.no_grad()
def check_elementwise(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Refuse an optimizer whose update of a number depends on others: tried on a small weight, cut in two.

    It is tried with the settings of each group of parameters, and with gradients that bring out what
    optimizers look at: one that is much larger than those before or much smaller, zero in one piece, or
    orthogonal or parallel to the weight.

    Args:
        optimizer: Over parameters; they are left alone.
        strategy: Names who asks, for a person.

    Raises:
        UserError: It cannot be split, or what it does cannot be tried.
    """
    _check_alike(optimizer, strategy, "split", _pieces, "others of the same weight, which other ranks have")


@torch.no_grad()
def check_separable(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Refuse an optimizer whose update of a weight depends on other weights, which are on other ranks.

    Args:
        optimizer: Over parameters; they are left alone.
        strategy: Names who asks, for a person.

    Raises:
        UserError: It is such an optimizer, or what it does cannot be tried.
    """
    _check_alike(optimizer, strategy, "spread over ranks", _halves, "other weights, which other ranks have")


def _check_alike(
    optimizer: torch.optim.Optimizer,
    strategy: str,
    what: str,
    cut: Callable[[torch.Tensor], list[torch.Tensor]],
    on: str,
) -> None:
    """Compare one optimizer over parts of a weight with an optimizer for each part, as ranks would have."""
    name = type(optimizer).__name__
    if type(optimizer) in KNOWN:
        return
    estimates_rate = any("d0" in group for group in optimizer.param_groups)  # D-Adaptation, from all weights
    if estimates_rate or name in MATRIX_OPTIMIZERS:
        raise _refused(strategy, name, what, on)
    for settings in _settings(optimizer):
        with translated(
            lambda error: UserError(
                f"strategy {strategy} cannot have the optimizer {name} {what}: "
                f"{type(error).__name__}: {error}",
                hint=_HINT,
            )
        ):
            whole, apart, have_same_numbers = _updated(optimizer, settings, cut)
        if not have_same_numbers or not torch.allclose(whole, apart, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise _refused(strategy, name, what, on)


def _refused(strategy: str, name: str, what: str, on: str) -> UserError:
    return UserError(
        f"strategy {strategy} cannot have the optimizer {name} {what}: what it does to a number "
        f"depends on {on}",
        hint=_HINT,
    )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group, once each."""
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = {key: value for key, value in group.items() if key not in {"params", "lr", "lr_scale"}}
        if repr(own) not in map(repr, found):
            found.append(own)
    return found


def _pieces(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the pieces of a flat weight that ranks have."""
    flat = weight.reshape(-1)
    return [flat[first:last].clone() for first, last in pairwise(_CUTS)]


def _halves(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return two weights, of which each rank has one."""
    return [half.clone() for half in weight.chunk(2)]


def _updated(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    cut: Callable[[torch.Tensor], list[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return weights, flat and joined, after each step: of one optimizer over all, and of one for each part.

    Also whether all optimizers have the same numbers that are not of an element, such as an estimate of the
    rate.
    """
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    make = torch.Generator().manual_seed(0)
    weight = torch.randn(_SHAPE, generator=make, dtype=torch.float64)
    joined = cut is _halves  # of whole weights, one optimizer has several
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
    """Return the numbers of an optimizer that are of no single element: of groups, parameters and itself."""
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
    """Yield gradients of many kinds, one of each step."""

    def random(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(_SHAPE, generator=make, dtype=torch.float64)

    yield random()
    yield random()
    yield random(30.0)  # a spike, in all numbers
    yield random(1e-3)
    spike = random()
    spike[0] *= 100.0  # and in some
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
    """Return an optimizer like this one over other parameters."""
    group = {**copy.deepcopy(dict(settings)), "params": list(parameters), "lr": _LR}
    twin = clone_optimizer(optimizer, [group])
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = {}
    first = optimizer.param_groups[0]["params"][0]
    for parameter in parameters:
        if first in optimizer.state:  # of those that make it at once
            twin.state[parameter] = {
                key: _like(value, first, parameter) for key, value in optimizer.state[first].items()
            }
    if callable(switch := getattr(twin, "train", None)):
        switch()
    return twin


def _like(value: Any, of: torch.Tensor, parameter: torch.Tensor) -> Any:
    """Return a value of one parameter's first state as another parameter would have it."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.shape != of.shape or not value.numel():
        return value.clone()
    return torch.full_like(parameter, float(value.flatten()[0]))


def move_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, piece: torch.nn.Parameter, start: int
) -> None:
    """Give a piece of a parameter what the optimizer's state has of it, if there is a state by now.

    Args:
        optimizer: Has it under the parameter.
        parameter: The whole.
        piece: Flat.
        start: Where the piece begins in the flat parameter.
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
