"""What of a task and a model is kept in Python: values that passes may change, besides parameters and buffers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch

MAX_DEPTH = 6
MAX_LENGTH = 10_000
PLAIN = (bool, int, float, complex, str, bytes, type(None))
OF_PYTORCH = {"_parameters", "_buffers", "_modules", "training"}


def python_state(*objects: object) -> str:
    """Return a text that changes when a pass has changed what objects keep in Python.

    Numbers, texts, containers and random generators are compared by value, tensors and arrays by their memory and
    version, all else by identity and, where it has attributes, by those.
    """
    seen: set[int] = set()
    return repr([_frozen(each, seen, MAX_DEPTH) for each in objects])


def _frozen(value: Any, seen: set[int], depth: int) -> object:  # noqa: PLR0911  (a kind of value a line)
    if isinstance(value, PLAIN):
        return value
    if id(value) in seen or depth == 0:
        return id(value)
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return id(value) if value.is_meta else (id(value), value._version)  # noqa: SLF001
    if isinstance(value, np.ndarray):
        return id(value), hash(value.tobytes()) if value.nbytes <= MAX_LENGTH else 0
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, torch.Generator):
        return hash(value.get_state().numpy().tobytes())
    if isinstance(value, Mapping):
        if len(value) > MAX_LENGTH:
            return id(value), len(value)
        return [(_frozen(key, seen, depth - 1), _frozen(each, seen, depth - 1)) for key, each in value.items()]
    if isinstance(value, list | tuple | Set):
        if len(value) > MAX_LENGTH:
            return id(value), len(value)
        return [_frozen(each, seen, depth - 1) for each in value]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return id(value)
    attributes = dict(vars(value))
    if isinstance(value, torch.nn.Module):
        children = [_frozen(child, seen, depth) for child in value._modules.values()]  # noqa: SLF001
        for name in OF_PYTORCH:
            attributes.pop(name, None)
        return children, [(name, _frozen(each, seen, depth - 1)) for name, each in attributes.items()]
    return [(name, _frozen(each, seen, depth - 1)) for name, each in attributes.items()]
