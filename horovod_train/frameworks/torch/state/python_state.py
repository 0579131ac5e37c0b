"""Python state of a task and a model, that is, state other than parameters and buffers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from types import CellType, FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MAX_DEPTH = 6
MAX_LENGTH = 10_000
PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (Mapping, list, tuple, AbstractSet)
BATCH_NORM_CLASSES = {"_parameters", "_buffers", "_modules", "training"}


def python_state(*objects: object) -> str:
    """Return a text that differs if the Python state of the objects differs.

    Numbers, strings, containers, random generators and small arrays are compared by value, tensors by
    identity and version, and other objects by attributes. Objects without attributes, below ``MAX_DEPTH`` or
    above ``MAX_LENGTH`` are compared by identity.
    """
    seen: set[int] = set()
    return repr([_frozen(each, seen, MAX_DEPTH) for each in objects])


def _frozen(value: Any, seen: set[int], depth: int) -> object:
    if isinstance(value, PLAIN):
        return value
    if id(value) in seen or depth == 0:
        return id(value)
    seen.add(id(value))
    for kinds, freeze in KINDS:
        if isinstance(value, kinds):
            return freeze(value)
    if isinstance(value, type) or not (hasattr(value, "__dict__") or isinstance(value, CONTAINERS)):
        return id(value)
    children = _children(value)
    if len(children) > MAX_LENGTH:
        return id(value), len(children)
    # Modules do not count, because the layers of a model may be nested deeply.
    below = depth if isinstance(value, torch.nn.Module) else depth - 1
    return [_frozen(child, seen, below) for child in children]


def _children(value: Any) -> list[Any]:
    """Return the members of a container, or the captured values or attributes of an object."""
    if isinstance(value, Mapping):
        return [each for pair in value.items() for each in pair]
    if isinstance(value, CONTAINERS):
        return list(value)
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return [*cells, *(value.__defaults__ or ()), *vars(value).values()]
    attributes = dict(vars(value))
    if not isinstance(value, torch.nn.Module):
        return [each for pair in attributes.items() for each in pair]
    modules = list(value._modules.values())  # noqa: SLF001
    own = [each for name, each in attributes.items() if name not in BATCH_NORM_CLASSES]
    return [*modules, *own, *(attributes.keys() - BATCH_NORM_CLASSES)]


def _content(cell: CellType) -> object:
    """Return the content of a closure cell; None: it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _array(value: npt.NDArray[Any]) -> object:
    return id(value), hash(value.tobytes()) if value.nbytes <= MAX_LENGTH else 0


def _tensor(value: torch.Tensor) -> object:
    return id(value), 0 if value.is_meta or value.is_inference() else value._version  # noqa: SLF001


KINDS: list[tuple[type, Callable[[Any], object]]] = [
    (torch.Tensor, _tensor),
    (np.ndarray, _array),
    (random.Random, lambda value: hash(value.getstate())),
    (np.random.Generator, lambda value: repr(value.bit_generator.state)),
    (np.random.RandomState, lambda value: repr(value.get_state(legacy=False))),
    (torch.Generator, lambda value: hash(value.get_state().numpy().tobytes())),
]
"""Types whose values are compared by a special function."""
