"""Values in Python that the code between modules reads: a trace contains those of its time.

Python does not report reads of attributes. Values are therefore found from the code: the functions of the
opened modules refer to attributes, keys, global variables and variables of enclosing functions by name, and
the objects behind them are walked over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from horovod_train.frameworks.torch.state.python_state import PLAIN

MAX_DEPTH = 4
MAX_VALUES = 2000
MAX_LENGTH = 100
"""Longest list whose elements are compared."""
NOT_WALKED = (torch.nn.Module, torch.Tensor, ModuleType)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class _Place:
    """A value, and where it is: the content of a cell, or an element of a mapping or list."""

    name: str
    holder: Any
    key: Any
    value: object

    @property
    def is_changed(self) -> bool:
        """Whether there is another value now."""
        try:
            now = self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder[self.key]
        except (ValueError, LookupError):
            return True
        return now is not self.value and (type(now) is not type(self.value) or now != self.value)


class ValuesRead:
    """Values that the functions of some modules may read, as they are now.

    Args:
        modules: The opened modules by name, whose code a trace contains.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._seen: set[int] = set()
        self._names: set[object] = set()
        self._places: list[_Place] = []
        self._hooks = [
            (name, found, tuple(found))
            for name, module in modules.items()
            for found in (getattr(module, kind) for kind in HOOKS)
        ]
        functions = [each for module in modules.values() for each in _functions_of(type(module))]
        for function in functions:
            self._names |= _names_in(function.__code__)
        for name, module in modules.items():
            for key, value in vars(module).items():
                if not key.startswith("_") and not isinstance(value, PLAIN):  # these are compared elsewhere
                    self._walk(value, f"{name}.{key}".removeprefix("."), MAX_DEPTH)
            for kind in type(module).__mro__:
                self._walk(kind, kind.__name__, MAX_DEPTH)
        for function in functions:
            self._walk_function(function, MAX_DEPTH)

    def changed(self) -> str | None:
        """Return what has changed, in words; None: nothing."""
        for name, found, before in self._hooks:
            if tuple(found) != before:
                return f"the hooks of {name or 'the model'} have changed"
        place = next((each for each in self._places if each.is_changed), None)
        return None if place is None else f"{place.name}, which the model's code reads, has changed"

    def _walk_function(self, function: FunctionType, depth: int) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        code = function.__code__
        self._names |= _names_in(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if _has_content(cell):
                self._add(name, cell, None, cell.cell_contents, depth)
        for word in _names_in(code) & function.__globals__.keys():
            self._add(str(word), function.__globals__, word, function.__globals__[str(word)], depth)

    def _add(self, name: str, holder: Any, key: object, value: Any, depth: int) -> None:
        if len(self._places) >= MAX_VALUES:
            return
        if isinstance(value, PLAIN):
            self._places.append(_Place(name, holder, key, value))
        else:
            self._walk(value, name, depth - 1)

    def _walk(self, value: Any, name: str, depth: int) -> None:
        value = value.__func__ if isinstance(value, MethodType) else value
        if depth < 0 or id(value) in self._seen or isinstance(value, NOT_WALKED):
            return
        if isinstance(value, FunctionType):
            if not _is_library(value):
                self._walk_function(value, depth)
            return
        self._seen.add(id(value))
        for text, holder, key in self._elements(value):
            self._add(f"{name}{text}", holder, key, holder[key], depth)

    def _elements(self, value: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield text, holder and key of those elements or attributes of an object that code may read."""
        if isinstance(value, dict):
            yield from ((f"[{key!r}]", value, key) for key in list(value) if key in self._names)
        elif isinstance(value, list | tuple):
            yield from ((f"[{place}]", value, place) for place in range(min(len(value), MAX_LENGTH)))
        elif hasattr(value, "__dict__") and not _is_library(
            value if isinstance(value, type) else type(value)
        ):
            attributes = vars(value)
            yield from ((f".{key}", attributes, key) for key in list(attributes) if key in self._names)


def _functions_of(kind: type) -> Iterator[FunctionType]:
    """Yield the methods of a class that may run in a forward pass, with those of its own base classes."""
    for each in kind.__mro__:
        if not _is_library(each):
            for name, value in vars(each).items():
                function = value.fget if isinstance(value, property) else value
                if isinstance(function, FunctionType) and name != "__init__":
                    yield function


def _is_library(value: Any) -> bool:
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return package in {"torch", "builtins", "numpy", "collections", "functools", "horovod_train"}


def _names_in(code: CodeType) -> set[object]:
    """Return names of attributes and global variables, and constants that may be keys, also of inner code."""
    found: set[object] = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= _names_in(each)
    return found


def _has_content(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
