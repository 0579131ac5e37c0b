"""Which parts of a model are handled as one: gathered, recomputed, or put on a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch

from horovod_train.errors import UserError

CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)


def modules_fitting(
    model: torch.nn.Module, patterns: Iterable[str], field: str
) -> dict[str, torch.nn.Module]:
    """Return the outermost modules whose names fit a pattern, by name.

    Args:
        model: Whose modules.
        patterns: As of files: ``layers.*``.
        field: The job's field that has them, for the message of an error.

    Raises:
        UserError: A pattern fits no module.
    """
    found: dict[str, torch.nn.Module] = {}
    for pattern in patterns:
        fitting: dict[str, torch.nn.Module] = {}
        for name, module in model.named_modules():
            if name and fnmatchcase(name, pattern) and not _is_inside(name, fitting):
                fitting[name] = module
        if not fitting:
            names = [name for name, _ in model.named_modules() if name]
            raise UserError(
                f"{field}: {pattern!r} fits no module",
                hint=f"modules are {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}",
            )
        found.update(fitting)
    return found


def units_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return a model's repeated parts, by name: what its outermost lists of modules have.

    Those are the layers of most models: ``ModuleList`` and ``Sequential``. A model without such lists has the
    parts that it is made of. A list in a list is one part.
    """
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, CONTAINERS) and not _is_inside(name, found):
            prefix = f"{name}." if name else ""
            found.update({f"{prefix}{key}": child for key, child in module.named_children()})
    return _with_parameters(found or dict(model.named_children()))


def units_to_shard(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the units of a model that can be gathered each by itself, by name.

    Not those without their own forward pass, whose members are called, and not those that share a
    parameter with the rest of the model: they are gathered with the model.
    """
    units: dict[str, torch.nn.Module] = {}
    for name, module in units_of(model).items():
        units.update(_callable_parts(name, module))
    used_in: Counter[int] = Counter()
    for module in model.modules():
        used_in.update(id(each) for each in module.parameters(recurse=False))
    return {
        name: unit
        for name, unit in units.items()
        if not isinstance(unit, torch.jit.ScriptModule) and not _is_tied(unit, used_in)
    }


def _callable_parts(name: str, module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    if type(module).forward is not torch.nn.Module.forward:
        return {name: module}
    parts: dict[str, torch.nn.Module] = {}
    for key, child in module.named_children():
        parts.update(_callable_parts(f"{name}.{key}", child))
    return _with_parameters(parts)


def _is_tied(unit: torch.nn.Module, used_in: Mapping[int, int]) -> bool:
    """Whether a parameter of a unit belongs to a module outside of it, too."""
    inside: Counter[int] = Counter()
    for module in unit.modules():
        inside.update(id(each) for each in module.parameters(recurse=False))
    return any(used_in[parameter] > number for parameter, number in inside.items())


def _with_parameters(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in modules.items() if any(True for _ in module.parameters())}


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    """Whether a module is one of the outer ones, or in one of them."""
    return any(name == each or name.startswith(f"{each}.") for each in outer)
