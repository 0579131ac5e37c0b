"""Checks that a model can be trained and saved, before training starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from horovod_train.checkpoint.arrays import DTYPE_CODES, METADATA
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.step.gradient_hooks import has_hooks, num_hooks


def check_model(model: torch.nn.Module) -> None:
    """Raise ``UserError`` with the first weight or buffer of a model that a checkpoint cannot contain."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter | UninitializedBuffer):
            raise UserError(
                f"the parameter {name!r} has no shape yet: it is of a lazy module",
                hint="call the model with a batch in the task's model(), before it is returned",
            )
    for name, value in model.state_dict(keep_vars=True).items():
        _check_value(name, value)


def _check_value(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise UserError(
            f"the model's state has {name!r}, which is a {type(value).__name__}: a checkpoint holds tensors",
            hint="let get_extra_state() return a tensor, or keep the state in a buffer",
        )
    if name == METADATA:
        raise UserError(
            f"the name {name!r} is one that safetensors files keep for themselves",
            hint="give the parameter or buffer another name",
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPE_CODES:
        raise UserError(
            f"{name!r} is of type {dtype}, which a checkpoint cannot hold",
            hint="use complex64 for complex128"
            if dtype == "complex128"
            else f"types are {', '.join(DTYPE_CODES)}",
        )
    if value.layout != torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        raise UserError(
            f"{name!r} is a sparse tensor ({layout}), which ranks cannot compare and a checkpoint "
            "cannot hold",
            hint="keep its indices and values as two buffers, and make the sparse tensor in forward()",
        )


def refuse_hooks_of_parameters(
    model: torch.nn.Module, strategy: str, *, are_parameters_replaced: bool = False
) -> None:
    """Raise ``UserError`` with the first parameter that has a hook of its gradient.

    If the strategy replaces parameters, hooks that only observe gradients are refused, too.
    """
    for name, parameter in model.named_parameters():
        if num_hooks(parameter) if are_parameters_replaced else has_hooks(parameter):
            raise UserError(
                f"strategy {strategy}: {name!r} has a hook of its gradient, which needs the whole gradient, "
                "but a rank has only a part of it",
                hint="use strategy: allreduce, ddp or fsdp",
            )


def refuse_repeated_parameters(model: torch.nn.Module, groups: Sequence[object]) -> None:
    """Refuse groups of a task in which a parameter occurs twice."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: set[int] = set()
    for group in groups:
        if not isinstance(group, dict) or isinstance(group.get("params", ()), torch.Tensor):
            continue
        group["params"] = list(group.get("params", ()))  # an iterator could be read only once
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise UserError(
                    f"param_groups(model) returns {names.get(id(parameter), 'a parameter')!r} twice",
                    hint="let each parameter be in one group",
                )
            seen.add(id(parameter))
