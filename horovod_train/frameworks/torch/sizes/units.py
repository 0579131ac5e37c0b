"""Units of a model: modules that are gathered, recomputed, or assigned to a rank as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch

from horovod_train.errors import UserError

CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)


def modules_matching(
    model: torch.nn.Module, patterns: Iterable[str], field: str
) -> dict[str, torch.nn.Module]:
    """Return the outermost modules whose names match a pattern, by name.

    Args:
        model: The model.
        patterns: Shell-style patterns, such as ``layers.*``.
        field: Field of the job that contains the patterns, for error messages.

    Raises:
        UserError: A pattern matches no module.
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
    """Return the members of the outermost ``ModuleList`` and ``Sequential`` modules of a model, by name.

    In most models these are the layers. Without such containers, the children of the model are returned. A
    nested container is one unit. Modules without parameters are left out.
    """
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, CONTAINERS) and not _is_inside(name, found):
            prefix = f"{name}." if name else ""
            found.update({f"{prefix}{key}": child for key, child in module.named_children()})
    return _with_parameters(found or dict(model.named_children()))


def units_to_shard(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the units of a model that FSDP can gather separately, by name.

    A unit without its own ``forward`` is replaced by its children, because only they are called. A unit that
    shares a parameter with the rest of the model is left out: it is gathered with the model.
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
    """Return whether a parameter of a unit also belongs to a module outside of the unit."""
    inside: Counter[int] = Counter()
    for module in unit.modules():
        inside.update(id(each) for each in module.parameters(recurse=False))
    return any(used_in[parameter] > number for parameter, number in inside.items())


def _with_parameters(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in modules.items() if any(True for _ in module.parameters())}


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    """Return whether a module is one of the outer modules or a submodule of one."""
    return any(name == each or name.startswith(f"{each}.") for each in outer)
