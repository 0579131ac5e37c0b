"""Tensors that ranks share (PyTorch's ``DTensor``): what of them is here, and where it lies in the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from horovod_train.checkpoint.arrays import Part
from horovod_train.frameworks.torch.collectives import TensorCollectives
from horovod_train.frameworks.torch.gradient_buckets import here
from horovod_train.frameworks.torch.held import Held, Optimized, whole_parameters


def held_of(tensor: torch.Tensor) -> Held:
    """Return what this rank has of a tensor."""
    if not isinstance(tensor, DTensor):
        return Held(tensor.detach())
    own, whole = here(tensor), tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
    assert tuple(own.shape) == tuple(shape)
    part = None if tuple(shape) == whole else Part(whole, tuple(offset))
    return Held(own, part, partial(_like, tensor=tensor))


def _like(own: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Return a tensor of which this is here, shared as another one is."""
    return DTensor.from_local(
        own.to(tensor.device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def num_copies(tensor: torch.Tensor, num_ranks: int) -> int:
    """Return on how many ranks the same of a tensor lies."""
    if not isinstance(tensor, DTensor):
        return num_ranks
    sizes = [
        tensor.device_mesh.size(at)
        for at, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    return num_ranks // math.prod(sizes)


def held_model(model: torch.nn.Module) -> dict[str, Held]:
    """Return what this rank has of a model's weights and buffers, by their names in it."""
    return {name: held_of(tensor) for name, tensor in model.state_dict().items()}


def held_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Optimized]:
    """Return this rank's parts of an optimizer's parameters, in its order."""
    return [Optimized(each.name, held_of(each.held.tensor)) for each in whole_parameters(model, optimizer)]


def take_no_two_kinds_at_once(optimizer: torch.optim.Optimizer) -> None:
    """Update shared and whole parameters of a group one by one: a kernel for all takes one kind."""
    for group in optimizer.param_groups:
        kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
        if len(kinds) > 1 and group.get("foreach") is None:
            group["foreach"] = False


def norm_of(
    parameters: Iterable[torch.nn.Parameter],
    ranks: TensorCollectives,
    copies: Callable[[torch.nn.Parameter], int],
) -> torch.Tensor:
    """Return the L2 norm of a gradient that ranks share, shape []: each part of it counts once.

    Args:
        parameters: Those here.
        ranks: All ranks that share the model, or have copies of it.
        copies: Returns on how many of them the same of a parameter lies.
    """
    found = list(parameters)
    squares = torch.zeros(1, dtype=torch.float64, device=here(found[0]).device)
    for parameter in found:
        if parameter.grad is not None:
            squares += here(parameter.grad).double().square().sum() / copies(parameter)
    return ranks.wait(ranks.start_allreduce(squares, "horovod_train.norm")).sqrt()[0]
