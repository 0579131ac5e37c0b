"""Tensors that ranks share (PyTorch's ``DTensor``): what of them is here, and where it lies in the whole."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from horovod_train.checkpoint.arrays import Part
from horovod_train.frameworks.torch.held import Held


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is here of a tensor: the same memory."""
    return _here(tensor) if isinstance(tensor, DTensor) else tensor


def _here(tensor: DTensor) -> torch.Tensor:
    here: torch.Tensor = tensor.to_local()
    return here


def held_of(tensor: torch.Tensor) -> Held:
    """Return what this rank has of a tensor."""
    if not isinstance(tensor, DTensor):
        return Held(tensor.detach())
    here, whole = _here(tensor).detach(), tuple(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
    assert tuple(here.shape) == tuple(shape)
    part = None if tuple(shape) == whole else Part(whole, tuple(offset))
    return Held(here, part, partial(_like, tensor=tensor))


def _like(here: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Return a tensor of which this is here, shared as another one is."""
    return DTensor.from_local(
        here.to(tensor.device),
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
