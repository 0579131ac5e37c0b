"""Tensors that ranks share (PyTorch's ``DTensor``): what of them is here, and where it lies in the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from horovod_train.checkpoint.arrays import Part
from horovod_train.checkpoint.plain_weights import FIELD
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.buckets import to_local
from horovod_train.frameworks.torch.state.local_tensors import (
    LocalTensor,
    OptimizedParameter,
    whole_parameters,
)


def local_tensor_of(tensor: torch.Tensor) -> LocalTensor:
    """Return what this rank has of a tensor."""
    if not isinstance(tensor, DTensor):
        return LocalTensor(tensor.detach())
    own, whole = to_local(tensor), tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
    if tensor.numel() == 0:  # of nothing each rank has nothing, whatever the shape
        return LocalTensor(own, None, partial(_like, tensor=tensor))
    assert tuple(own.shape) == tuple(shape)
    part = None if tuple(shape) == whole else Part(whole, tuple(offset))
    return LocalTensor(own, part, partial(_like, tensor=tensor))


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


def local_tensors_of_model(model: torch.nn.Module) -> dict[str, LocalTensor]:
    """Return what this rank has of a model's weights and buffers, by their names in it."""
    return {name: local_tensor_of(tensor) for name, tensor in model.state_dict().items()}


def optimized_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[OptimizedParameter]:
    """Return this rank's parts of an optimizer's parameters, in its order."""
    return [
        OptimizedParameter(each.name, local_tensor_of(each.local.tensor))
        for each in whole_parameters(model, optimizer)
    ]


@contextmanager
def gathered_full(model: torch.nn.Module) -> Iterator[None]:
    """Let a model have whole parameters, with their gradients, while the block runs; keep what it changes.

    All ranks have to make the same changes. Each holds the whole model meanwhile.

    Raises:
        UserError: The block has replaced a parameter.
    """
    wholes: dict[Any, torch.nn.Parameter] = {}  # by the DTensor that is here
    places: list[tuple[torch.nn.Module, str, Any]] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor):
                places.append((module, name, parameter))
                if parameter not in wholes:
                    wholes[parameter] = _whole(parameter)
    for module, name, parameter in places:
        module._parameters[name] = wholes[parameter]  # noqa: SLF001  (a setter would tell fully_shard)
    yield
    for module, name, parameter in places:
        if module._parameters.get(name) is not wholes[parameter]:  # noqa: SLF001
            raise UserError(
                f"after_update(model) has replaced {name!r} of a "
                f"{type(module).__name__}, which cannot be shared between ranks",
                hint="change the parameter in place: parameter.copy_(...)",
            )
        module._parameters[name] = parameter  # noqa: SLF001
    with torch.no_grad():
        for parameter, whole in wholes.items():
            shape, offset = compute_local_shape_and_global_offset(
                tuple(whole.shape), parameter.device_mesh, parameter.placements
            )
            part = tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))
            to_local(parameter).copy_(whole[part])


def _whole(parameter: Any) -> torch.nn.Parameter:
    gradient = parameter.grad
    whole = torch.nn.Parameter(parameter.full_tensor().detach().clone(), parameter.requires_grad)
    if gradient is not None:
        whole.grad = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole


def disable_foreach_for_mixed_groups(optimizer: torch.optim.Optimizer) -> None:
    """Update shared and whole parameters of a group one by one: a kernel for all takes one kind."""
    for group in optimizer.param_groups:
        kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
        if len(kinds) > 1 and group.get("foreach") is None:
            group["foreach"] = False


def squares_of(
    parameters: Iterable[torch.nn.Parameter], copies: Callable[[torch.nn.Parameter], int]
) -> torch.Tensor:
    """Return this rank's part of the sum of a gradient's squares, shape [1], in 64 bits.

    Summed over all ranks that share the model, or have copies of it, each part of the gradient counts once.

    Args:
        parameters: Those here.
        copies: Returns on how many ranks the same of a parameter lies.
    """
    found = list(parameters)
    squares = torch.zeros(1, dtype=torch.float64, device=to_local(found[0]).device)
    for parameter in found:
        if parameter.grad is not None:
            squares += to_local(parameter.grad).abs().double().square().sum() / copies(parameter)
    return squares


def materialize(model: torch.nn.Module, weights_on: torch.device, rest_on: torch.device) -> None:
    """Give weights without memory some, uninitialized; bring everything else to its device.

    What is one weight stays one, which ``to_empty`` does not see to; and buffers keep their numbers.

    Args:
        model: The model.
        weights_on: Where weights that ranks share are.
        rest_on: Where buffers are, and weights that each rank has.

    Raises:
        UserError: A buffer was computed from weights.
    """
    placed: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in placed:
                data = parameter.detach()
                device = weights_on if isinstance(data, DTensor) else rest_on
                moved = torch.empty_like(data, device=device) if data.is_meta else data.to(device)
                placed[id(parameter)] = torch.nn.Parameter(moved, parameter.requires_grad)
            module._parameters[name] = placed[id(parameter)]  # noqa: SLF001
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta:
                raise UserError(
                    f"{FIELD}: the buffer {name!r} of a {type(module).__name__} is computed from weights, "
                    "which come from a file later",
                    hint="compute it in forward, or use strategy: zero, which makes the model whole",
                )
            module._buffers[name] = buffer.to(rest_on)  # noqa: SLF001
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # noqa: SLF001  (lets fully_shard notice)
