"""Copy a task for the steps of the reference model during verification.

The copy has its own state, except shared state: class attributes, module variables, and variables captured by
closures. A change of shared state is refused, because the loss is called twice and would change it twice.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from horovod_train.errors import UserError, result_of
from horovod_train.frameworks.torch.state.python_state import python_state

LARGE_BYTES = 2**28
"""Larger tensors and arrays are shared between a task and its copy, like datasets."""
MAX_COUNTERS = 64
"""Largest number of elements of an integer buffer that is treated as a counter."""
COPIED = (
    MutableMapping, MutableSequence, MutableSet, dict, list, tuple, str, bytes, set, frozenset,
    torch.nn.Module, torch.Tensor, np.ndarray,
)  # fmt: skip
"""Types with a length and members that are not datasets."""
DATA = (bool, int, float, complex, *COPIED)
OF_A_LIBRARY = ("torch", "numpy", "builtins", "horovod_train", "horovod", "collections")


def copy_of_task(task: Any) -> Any:
    """Copy a task; datasets, large arrays, and objects that cannot be copied (files, modules) are shared."""
    own = copy.copy(task)
    memo: dict[int, Any] = {}
    if hasattr(own, "__dict__"):
        vars(own).update({name: copy_of_value(value, memo) for name, value in vars(task).items()})
    return own


def copy_of_value(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a task's attribute, or the attribute itself if it is large or cannot be copied.

    Args:
        value: The attribute.
        memo: Objects that were copied (see ``copy.deepcopy``), so that copies share objects like attributes.
    """
    if isinstance(value, type | ModuleType | FunctionType | io.IOBase) or _is_large(value):
        return value
    is_dataset = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, COPIED)
    if is_dataset:
        return value
    copied, problem = result_of(lambda: copy.deepcopy(value, memo))
    return copied if problem is None else _attribute_by_attribute(value, memo)


def _attribute_by_attribute(value: Any, memo: dict[int, Any]) -> Any:
    """Copy an object with a member that cannot be copied, such as a file, which is shared."""
    if not hasattr(value, "__dict__") or isinstance(value, torch.nn.Module | MethodType):
        return value
    own, problem = result_of(lambda: copy.copy(value))
    if problem is not None:
        return value
    memo[id(value)] = own
    vars(own).update({name: copy_of_value(each, memo) for name, each in vars(value).items()})
    return own


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > LARGE_BYTES


def generators_of(task: Any) -> list[str]:
    """Return the names of a task's attributes that are generators, whose position cannot be copied."""
    return [name for name, value in vars(task).items() if isinstance(value, GeneratorType)]


def counter_state(task: Any, model: torch.nn.Module) -> object:
    """Return the Python state of a task and a model and the model's integer buffers, for comparison."""
    counters = [
        buffer.tolist()
        for name, buffer in model.named_buffers()
        if not (buffer.is_floating_point() or buffer.is_complex() or name.endswith("num_batches_tracked"))
        and buffer.numel() <= MAX_COUNTERS
    ]
    return python_state(task, model), counters


class SharedState:
    """State that a task and its copy share, and that a call of the copy must not change."""

    def __init__(self, task: Any, model: torch.nn.Module) -> None:
        self._task = task
        classes = [type(task), *(type(module) for module in model.modules())]
        own = {each for found in classes for each in found.__mro__ if not _is_of_a_library(each.__module__)}
        self._classes = sorted(own, key=lambda each: (each.__module__, each.__qualname__))
        names = {each.__module__ for each in self._classes}
        self._modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
        self._before: dict[str, str] = {}

    def remember(self) -> None:
        """Record the current state."""
        self._before = dict(self._states())

    def check(self) -> None:
        """Raise ``UserError`` with the first attribute or variable that has changed since ``remember``."""
        for name, state in self._states():
            if self._before.get(name, state) != state:
                raise UserError(
                    f"the task's loss, or its model, changes {name} when it is called, and the comparison of "
                    "the first steps with the plain model has to call it twice",
                    hint="keep it in an attribute of the task or the model (self.x), or set "
                    "health.verify_strategy: false",
                )

    def _states(self) -> Iterator[tuple[str, str]]:
        for name, value in vars(self._task).items():
            yield f"self.{name}", python_state(value)
        for owner in self._classes:
            for name, value in vars(owner).items():
                if not name.startswith("__") and isinstance(value, DATA):
                    yield f"{owner.__qualname__}.{name}", python_state(value)
        for module in self._modules:
            for name, value in vars(module).items():
                is_own = getattr(type(value), "__module__", "") == module.__name__
                if not name.startswith("__") and (isinstance(value, DATA) or is_own):
                    yield f"{module.__name__}.{name}", python_state(value)
                if isinstance(value, FunctionType) and vars(value):
                    yield f"{module.__name__}.{name}", python_state(vars(value))


def _is_of_a_library(module: str) -> bool:
    return module.partition(".")[0] in OF_A_LIBRARY
