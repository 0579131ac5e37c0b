"""Sharded tensors (PyTorch's ``DTensor``): the local shard and its position in the whole tensor."""

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
from horovod_train.checkpoint.inspect import FIELD
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.state.local import (
    LocalTensor,
    OptimizedParameter,
    to_local,
    whole_parameters,
)


def local_tensor_of(tensor: torch.Tensor) -> LocalTensor:
    """Return this rank's shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return LocalTensor(tensor.detach())
    own, whole = to_local(tensor), tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
    if tensor.numel() == 0:  # the shard has no elements on any rank
        return LocalTensor(own, None, partial(_like, tensor=tensor))
    assert tuple(own.shape) == tuple(shape)
    part = None if tuple(shape) == whole else Part(whole, tuple(offset))
    return LocalTensor(own, part, partial(_like, tensor=tensor))


def _like(own: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    return DTensor.from_local(
        own.to(tensor.device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def num_copies(tensor: torch.Tensor, num_ranks: int) -> int:
    """Return the number of ranks that store the same shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return num_ranks
    sizes = [
        tensor.device_mesh.size(at)
        for at, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    return num_ranks // math.prod(sizes)


def local_tensors_of_model(model: torch.nn.Module) -> dict[str, LocalTensor]:
    """Return this rank's shards of a model's weights and buffers, by name."""
    return {name: local_tensor_of(tensor) for name, tensor in model.state_dict().items()}


def optimized_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[OptimizedParameter]:
    """Return this rank's shards of an optimizer's parameters, in its order."""
    return [
        OptimizedParameter(each.name, local_tensor_of(each.local.tensor))
        for each in whole_parameters(model, optimizer)
    ]


@contextmanager
def gathered_full(model: torch.nn.Module) -> Iterator[None]:
    """Gather whole parameters and gradients of a model for the block; changes of parameters are retained.

    Collective. All ranks must make the same changes. Each rank stores the whole model while the block runs.

    Raises:
        UserError: The block has replaced a parameter.
    """
    wholes: dict[Any, torch.nn.Parameter] = {}  # by DTensor
    places: list[tuple[torch.nn.Module, str, Any]] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor):
                places.append((module, name, parameter))
                if parameter not in wholes:
                    wholes[parameter] = _whole(parameter)
    for module, name, parameter in places:
        module._parameters[name] = wholes[parameter]  # noqa: SLF001  (a setter would notify fully_shard)
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
    """Disable ``foreach`` in groups with sharded and whole parameters, which its kernels do not support."""
    for group in optimizer.param_groups:
        kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
        if len(kinds) > 1 and group.get("foreach") is None:
            group["foreach"] = False


def squares_of(
    parameters: Iterable[torch.nn.Parameter], copies: Callable[[torch.nn.Parameter], int]
) -> torch.Tensor:
    """Return this rank's part of the squared L2 norm of the gradient, shape [1], in float64.

    In the sum over all ranks, each element of the gradient counts once.

    Args:
        parameters: The parameters of this rank, at least one.
        copies: Returns the number of ranks that store the same shard of a parameter.
    """
    found = list(parameters)
    squares = torch.zeros(1, dtype=torch.float64, device=to_local(found[0]).device)
    for parameter in found:
        if parameter.grad is not None:
            squares += to_local(parameter.grad).abs().double().square().sum() / copies(parameter)
    return squares


def materialize(model: torch.nn.Module, weights_on: torch.device, rest_on: torch.device) -> None:
    """Allocate uninitialized memory for weights on the meta device; move all other tensors to their device.

    Unlike ``to_empty``, this retains shared weights and the values of buffers.

    Args:
        model: The model.
        weights_on: Device of sharded weights.
        rest_on: Device of buffers and unsharded weights.

    Raises:
        UserError: A buffer is computed from weights.
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
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # noqa: SLF001  (for fully_shard)
