"""Optimizers that update each number by itself, so that a rank can update some numbers of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.optimizer import twin_of

_STEPS = 3
_CUTS = (0, 5, 12)  # of a weight of twelve numbers


@torch.no_grad()
def check_elementwise(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Refuse an optimizer whose update of a number depends on others: tried on a small weight.

    Args:
        optimizer: Over parameters; they are left alone.
        strategy: Names who asks, for a person.

    Raises:
        UserError: It cannot be split, or what it does cannot be tried.
    """
    name = type(optimizer).__name__
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(_STEPS)]
    flat = weight.flatten()
    pieces = [flat[first:last] for first, last in pairwise(_CUTS)]
    cut_gradients = [[g.flatten()[a:b] for a, b in pairwise(_CUTS)] for g in gradients]
    try:
        whole = _updated(optimizer, [weight], [[gradient] for gradient in gradients], device)
        cut = _updated(optimizer, pieces, cut_gradients, device)
    except Exception as error:  # whatever an optimizer of somebody's raises
        raise UserError(
            f"strategy {strategy} cannot split the optimizer {name}: {type(error).__name__}: {error}",
            hint="use sgd, adam or adamw, or strategy: allreduce",
        ) from error
    if not torch.allclose(whole, cut, rtol=1e-9, atol=1e-12):
        raise UserError(
            f"strategy {strategy} cannot split the optimizer {name}: what it does to a number depends on "
            "others of the same weight, which other ranks have",
            hint="use sgd, adam or adamw, or strategy: allreduce",
        )


def _updated(
    optimizer: torch.optim.Optimizer,
    weights: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
) -> torch.Tensor:
    """Return weights, flat and joined, after steps of an optimizer like this one."""
    parameters = [torch.nn.Parameter(weight.clone().to(device)) for weight in weights]
    # A rate of its own: that of a job may be too small to see anything.
    twin = twin_of(optimizer, [{**optimizer.param_groups[0], "params": parameters, "lr": 0.1}])
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = {}
    first = optimizer.param_groups[0]["params"][0]
    for parameter in parameters:
        if first in optimizer.state:  # of those that make it at once
            twin.state[parameter] = {
                key: _like(value, first, parameter) for key, value in optimizer.state[first].items()
            }
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone().to(device)
        twin.step()
    return torch.cat([parameter.flatten() for parameter in parameters]).cpu()


def _like(value: Any, of: torch.Tensor, parameter: torch.Tensor) -> Any:
    """Return a value of one parameter's first state as another parameter would have it."""
    if not isinstance(value, torch.Tensor):
        return value
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
