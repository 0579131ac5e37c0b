"""Values in Python that the code between modules reads: a trace contains those of its time.

Python does not report reads of attributes. Values are therefore found from the code: the functions that the
``forward`` of an opened module may reach refer to attributes, keys, global variables and variables of
enclosing functions by name, and the objects behind them are walked over.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from horovod_train.frameworks.torch.state.python_state import PLAIN

MAX_DEPTH = 4
MAX_VALUES = 2000
MAX_LENGTH = 100
"""Longest list whose elements are compared."""
MAX_ROUNDS = 8
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
        """Whether there is another value, or another object, now."""
        try:
            now = self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder[self.key]
        except (ValueError, LookupError):
            return True
        if now is self.value:
            return False
        return not (isinstance(now, PLAIN) and type(now) is type(self.value) and now == self.value)


@dataclass
class _Names:
    """What code refers to by name.

    Attributes:
        read: Attributes, keys, and global variables.
        called: Methods.
    """

    read: set[object] = field(default_factory=set)
    called: set[object] = field(default_factory=set)

    def add(self, code: CodeType) -> None:
        """Add the names in code, and in the code of its inner functions."""
        for each in dis.get_instructions(code):
            if each.opname == "LOAD_METHOD" or (each.opname == "LOAD_ATTR" and "NULL" in each.argrepr):
                self.called.add(each.argval)
            elif each.opname.startswith(("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_SUPER")):
                self.read.add(each.argval)
        for constant in code.co_consts:
            if isinstance(constant, str):
                self.read.add(constant)
            elif isinstance(constant, CodeType):
                self.add(constant)

    def __len__(self) -> int:
        return len(self.read) + len(self.called)


class ValuesRead:
    """Values that the ``forward`` of some modules may read, as they are now.

    Args:
        modules: The opened modules by name, whose code a trace contains.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._hooks = [
            (name, found, tuple(found))
            for name, module in modules.items()
            for found in (getattr(module, kind) for kind in HOOKS)
        ]
        self._names = _Names()
        for _ in range(MAX_ROUNDS):  # functions are found by names, and contain names
            num_names = len(self._names)
            self._seen: set[int] = set()
            self._places: list[_Place] = []
            for name, module in modules.items():
                self._walk_module(module, name)
            if len(self._names) == num_names:
                break

    def changed(self) -> str | None:
        """Return what has changed, in words; None: nothing."""
        for name, found, before in self._hooks:
            if tuple(found) != before:
                return f"the hooks of {name or 'the model'} have changed"
        place = next((each for each in self._places if each.is_changed), None)
        return None if place is None else f"{place.name}, which the model's code reads, has changed"

    def _walk_module(self, module: torch.nn.Module, name: str) -> None:
        forward = type(module).forward
        if isinstance(forward, FunctionType):
            self._walk_function(forward, MAX_DEPTH)
        for key, value in vars(module).items():
            # Numbers and strings of modules are compared elsewhere, whether they are read or not.
            if self._is_read(key, value) and not key.startswith("_") and not isinstance(value, PLAIN):
                self._add(f"{name}.{key}".removeprefix("."), vars(module), key, value, MAX_DEPTH)
        self._walk_class(type(module), MAX_DEPTH)

    def _walk_class(self, kind: type, depth: int) -> None:
        """Walk over attributes of a class, and over those of its methods that are called."""
        for each in kind.__mro__:
            if _is_library(each) or id(each) in self._seen:
                continue
            self._seen.add(id(each))
            for key, value in list(vars(each).items()):
                function = value.fget if isinstance(value, property) else value
                if isinstance(function, FunctionType):
                    if key in self._names.called or key in self._names.read:
                        self._walk_function(function, depth)
                elif key in self._names.read and not key.startswith("__"):
                    self._add(f"{each.__name__}.{key}", vars(each), key, value, depth)

    def _walk_function(self, function: FunctionType, depth: int) -> None:
        if id(function) in self._seen or _is_library(function):
            return
        self._seen.add(id(function))
        code, own = function.__code__, _Names()
        own.add(code)
        self._names.read |= own.read
        self._names.called |= own.called
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if _has_content(cell):
                self._add(name, cell, None, cell.cell_contents, depth)
        for word in own.read & function.__globals__.keys():
            self._add(str(word), function.__globals__, word, function.__globals__[str(word)], depth)

    def _add(self, name: str, holder: Any, key: object, value: Any, depth: int) -> None:
        if len(self._places) >= MAX_VALUES or isinstance(value, NOT_WALKED):
            return
        self._places.append(_Place(name, holder, key, value))
        if not isinstance(value, PLAIN):
            self._walk(value, name, depth - 1)

    def _walk(self, value: Any, name: str, depth: int) -> None:
        value = value.__func__ if isinstance(value, MethodType) else value
        if depth < 0 or isinstance(value, NOT_WALKED):
            return
        if isinstance(value, FunctionType):
            self._walk_function(value, depth)
        elif isinstance(value, type):
            self._walk_class(value, depth)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            for text, holder, key in self._elements(value):
                self._add(f"{name}{text}", holder, key, holder[key], depth)
            if not _is_library(type(value)):
                self._walk_class(type(value), depth)

    def _elements(self, value: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield text, holder and key of those elements or attributes of an object that code may read."""
        if isinstance(value, dict):
            yield from ((f"[{key!r}]", value, key) for key in list(value) if key in self._names.read)
        elif isinstance(value, list | tuple):
            yield from ((f"[{place}]", value, place) for place in range(min(len(value), MAX_LENGTH)))
        elif hasattr(value, "__dict__") and not _is_library(type(value)):
            attributes = vars(value)
            yield from (
                (f".{key}", attributes, key) for key, v in list(attributes.items()) if self._is_read(key, v)
            )

    def _is_read(self, name: str, value: object) -> bool:
        return name in self._names.read or (name in self._names.called and callable(value))


def _is_library(value: Any) -> bool:
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return package in {"torch", "builtins", "numpy", "collections", "functools", "typing", "horovod_train"}


def _has_content(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
