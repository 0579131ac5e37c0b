"""Parameters that ``fully_shard`` does not shard, with reasons: each rank stores them whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from horovod_train.frameworks.torch.step.gradient_hooks import num_hooks

Parameters = Mapping[torch.nn.Parameter, str]
"""Reason why each parameter is not sharded: a clause whose subject is the parameter."""
SPARSE = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def unsharded_parameters(
    model: torch.nn.Module, units: Iterable[torch.nn.Module]
) -> dict[torch.nn.Parameter, str]:
    """Return the parameters that ``fully_shard`` refuses or does not train correctly, with reasons.

    Args:
        model: The model.
        units: Modules that are gathered as units; parameters outside of units are gathered with the model.
    """
    storages = Counter(_storage(parameter) for parameter in model.parameters())
    found = {}
    for parameter in model.parameters():
        if parameter.dim() == 0 or parameter.numel() == 0:
            found[parameter] = "has no elements to share"
        elif num_hooks(parameter):
            found[parameter] = "has hooks of its gradient"
        elif not parameter.is_contiguous():
            found[parameter] = "is not contiguous"
        elif storages[_storage(parameter)] > 1:
            found[parameter] = "shares memory with another parameter"
    for module in model.modules():
        if isinstance(module, SPARSE) and module.sparse:
            found.update(dict.fromkeys(module.parameters(), "has sparse gradients"))
        if isinstance(module, torch.jit.ScriptModule):
            found.update(dict.fromkeys(module.parameters(), "belongs to a ScriptModule"))
    return found | _of_rare_types(model, units, found)


def _of_rare_types(
    model: torch.nn.Module, units: Iterable[torch.nn.Module], whole: Parameters
) -> dict[torch.nn.Parameter, str]:
    """Return the parameters whose dtype is not the dtype of most elements of their unit."""
    found = {}
    seen = set(whole)
    for unit in (*units, model):
        of_unit = [parameter for parameter in unit.parameters() if parameter not in seen]
        seen.update(of_unit)
        sizes: Counter[torch.dtype] = Counter()
        for parameter in of_unit:
            sizes[parameter.dtype] += parameter.numel()
        for parameter in of_unit:
            if parameter.dtype != sizes.most_common(1)[0][0]:
                found[parameter] = (
                    f"is {_name(parameter.dtype)} among others of {_name(sizes.most_common(1)[0][0])}"
                )
    return found


def describe(model: torch.nn.Module, whole: Parameters) -> str:
    """Return a human-readable sentence about unsharded parameters; empty if all of them are scalars."""
    large = {parameter: reason for parameter, reason in whole.items() if parameter.numel() > 1}
    if not large:
        return ""
    names = {parameter: name for name, parameter in model.named_parameters()}
    named = [f"{names[parameter]} {reason}" for parameter, reason in large.items()]
    more = f", and {len(named) - 3} more" if len(named) > 3 else ""
    total = sum(parameter.numel() for parameter in model.parameters())
    part = sum(parameter.numel() for parameter in large) / total
    return (
        f"{part:.1%} of the weights are whole on each rank, with their gradients and optimizer state: "
        f"{'; '.join(named[:3])}{more}"
    )


def move(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> None:
    """Move parameters to a device. Parameters that share memory share it on the device, too."""
    moved: dict[int, torch.UntypedStorage] = {}
    for parameter in parameters:
        if parameter.device == device:
            continue
        storage = moved.setdefault(_storage(parameter), parameter.untyped_storage().to(device=device))
        placeholder = torch.empty(0, dtype=parameter.dtype, device=device)
        parameter.data = placeholder.set_(
            storage, parameter.storage_offset(), parameter.shape, parameter.stride()
        )


def _storage(parameter: torch.nn.Parameter) -> int:
    return parameter.untyped_storage()._cdata  # noqa: SLF001  (meta tensors have no address)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
