"""Objects whose attributes are state in Python, found by walking over attributes.

Nothing here raises because of a user's object: what cannot be examined is opaque, and compared by identity.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np

from horovod_train.errors import result_of
from horovod_train.frameworks.fingerprint import fingerprint
from horovod_train.frameworks.plain_data import is_generator, is_plain, is_tensor

MAX_DEPTH = 6
MAX_OBJECTS = 20_000
"""Number of objects of one root above which no more are examined."""
MAX_LENGTH = 1_000
"""Longest container whose elements are examined if they are objects."""
MAX_BYTES = 2**28
"""Size of the largest value of a task or a model that is saved, and of all of them."""
MAX_BYTES_OF_DATA = 2**20
"""The same for a data set, whose changing attributes are mostly caches."""
LIBRARY_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
ALWAYS_LIBRARIES = {"builtins", "torch", "horovod_train"}

SCALARS = (type(None), bool, float)
Key = str | int | None
"""Name of an attribute, key or index; None: the object itself, for the result of ``state_dict()``."""
Path = tuple[str | int, ...]
"""Names of attributes, and keys or indices of containers, from a root to an object."""


@dataclass(frozen=True)
class Root:
    """An object whose state is saved.

    Attributes:
        name: Name in messages, such as ``task``.
        target: The object, a class, or a module.
        ignored: Names of attributes that are not examined: those of the framework's base class.
        is_trained: The object is the trained model, whose weights and buffers are saved elsewhere.
        is_shared: Ranks with the same part of the model should have the same state; not so for data sets.
        max_bytes: Size above which a value is not saved.
        is_reported: What is not saved is reported; not so for data sets, which open files and fill caches.
        key: Distinguishes roots of one name.
    """

    name: str
    target: Any
    ignored: Collection[str] = ()
    is_trained: bool = False
    is_shared: bool = True
    max_bytes: int = MAX_BYTES
    is_reported: bool = True
    key: str = "object"

    @property
    def id(self) -> str:
        """Name in checkpoints."""
        return f"{self.key} {self.name}"


@dataclass(frozen=True)
class Member:
    """An attribute or element of an object, as it is now.

    Attributes:
        name: As it is written in Python, such as ``task.config.tau``.
        value: The value, or the result of ``state_dict()``.
        kind: plain; own, for ``state_dict()``; object, whose attributes are examined; opaque; scratch, for
            tensors that a computation of gradients has made.
        mark: Differs if the member has changed: a fingerprint, or the identity of an object.
        is_shared: All ranks should have the same value.
    """

    name: str
    value: Any
    kind: str
    mark: str
    is_shared: bool = False


class Walk:
    """Walk over the objects of one root.

    Attributes:
        objects: Members of each object by key, by the object's path.
        is_complete: False: there are more than ``MAX_OBJECTS``.
    """

    def __init__(
        self, root: Root, seen: set[int], own_packages: Collection[str], read: Collection[str] = ()
    ) -> None:
        self._root, self._seen, self._own, self._read = root, seen, own_packages, read
        self.objects: dict[Path, dict[Key, Member]] = {}
        self.is_complete = True
        if _is_module(root.target) and root.is_trained:
            seen.update(_ids_of_weights(root.target))
        self._visit(root.target, (), root.name, MAX_DEPTH)

    def _visit(self, target: Any, path: Path, name: str, depth: int) -> None:
        if id(target) in self._seen or depth < 0 or not self.is_complete:
            return
        if len(self.objects) >= MAX_OBJECTS:
            self.is_complete = False
            return
        self._seen.add(id(target))
        if not path and _saves_itself(target) and not _is_module(target):
            own = self._own_state(target, name)
            self.objects[()] = {None: own} if own is not None else {}
            return
        members = self.objects[path] = {}
        items, _ = result_of(lambda: list(self._items(target, name)))
        for key, value, text in items or ():
            if type(value) in SCALARS:
                mark = f"{type(value).__name__} {value}"
                members[key] = Member(text, value, "plain", mark, self._root.is_shared)
                continue
            member, problem = result_of(partial(self._member, value, text, target))
            if problem is not None:
                member = Member(text, value, "opaque", str(id(value)))
            if member is None:
                continue
            members[key] = member
            if member.kind == "object":
                self._visit(value, (*path, key), text, depth if _is_module(value) else depth - 1)

    def _items(self, target: Any, name: str) -> Iterator[tuple[str | int, object, str]]:
        """Yield key, value and name of each member of an object."""
        if isinstance(target, dict):
            for key, value in list(target.items()):
                if isinstance(key, str | int):
                    yield key, value, f"{name}[{key!r}]"
        elif isinstance(target, list | tuple):
            for place, value in enumerate(target):
                yield place, value, f"{name}[{place}]"
        else:
            for key, value in attributes_of(target):
                if key not in self._root.ignored and not key.startswith("__"):
                    yield key, value, f"{name}.{key}"
        if _is_module(target):
            hidden = {key: target.get_buffer(key) for key in _hidden_buffers(target)}
            for key, value in {**hidden, **dict(target.named_children())}.items():
                yield key, value, f"{name}.{key}"

    def _member(self, value: Any, name: str, holder: object) -> Member | None:
        """Return a member; None: it is not examined."""
        if _is_scratch(value) or id(value) in self._seen:
            return Member(name, None, "scratch", "")
        is_library = _is_module(holder) and self._is_library(type(holder))
        if is_plain(value, by_sample=True, any_text=False) and not (is_library and is_tensor(value)):
            is_shared = self._root.is_shared and not is_library and not is_generator(value)
            if _is_module(holder) and is_tensor(value) and value.numel() > 1:
                is_shared = name in self._read  # others are activations
            return Member(name, value, "plain", fingerprint(value, by_identity=True), is_shared)
        if is_library and not _is_module(value):
            return None
        is_code = isinstance(self._root.target, type | ModuleType)
        if not is_code and _saves_itself(value) and not (_is_module(value) and self._root.is_trained):
            return self._own_state(value, name)
        # Of modules and classes, only functions with attributes are examined.
        if self._is_walkable(value) and (not is_code or (isinstance(value, FunctionType) and vars(value))):
            length = len(value) if type(value) in (list, tuple, dict) else 0
            return Member(name, value, "object", f"{id(value)} {length}")
        return Member(name, value, "opaque", str(id(value)))

    def _own_state(self, value: Any, name: str) -> Member | None:
        """Return the result of ``state_dict()`` as a member; None: there is none yet, or it is not plain."""
        self._seen.update(map(id, value.modules() if _is_module(value) else (value,)))
        state, problem = result_of(value.state_dict)
        if problem is not None or not is_plain(state):
            return Member(name, value, "opaque", str(id(value)))
        mark = f"{id(value)} {fingerprint(state, by_identity=True)}"
        return Member(name, state, "own", mark, self._root.is_shared)

    def _is_walkable(self, value: Any) -> bool:
        if isinstance(value, type | ModuleType):
            return False
        if type(value) in (list, tuple, dict):
            return len(value) <= MAX_LENGTH
        if isinstance(value, FunctionType):
            package = value.__module__.partition(".")[0] if value.__module__ else ""
            return package in self._own and bool(vars(value) or value.__closure__)
        has_attributes = type(value).__dictoffset__ != 0 or slots_of(type(value))
        return _is_module(value) or (bool(has_attributes) and not self._is_library(type(value)))

    def _is_library(self, kind: type) -> bool:
        package = kind.__module__.partition(".")[0]
        if package in self._own or package == "types":
            return False
        file = getattr(sys.modules.get(package), "__file__", None)
        return package in ALWAYS_LIBRARIES or file is None or file.startswith(LIBRARY_FOLDERS)


def attributes_of(target: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, also those in slots, and variables that a function has captured."""
    found = dict(getattr(target, "__dict__", {}))
    found |= {name: getattr(target, name) for name in slots_of(type(target)) if hasattr(target, name)}
    for name, cell in cells_of(target).items():
        value, problem = result_of(partial(getattr, cell, "cell_contents"))
        if problem is None:  # otherwise, the variable has no value yet
            found[str(name)] = value
    return list(found.items())


def slots_of(kind: type) -> list[str]:
    """Return the names of the slots of a class."""
    listed = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    names = (name for slots in listed for name in ([slots] if isinstance(slots, str) else slots))
    return [name for name in names if not name.startswith("__")]


def cells_of(target: object) -> dict[str | int, CellType]:
    """Return the captured variables of a function, by name in parentheses; empty: it is another object."""
    if not isinstance(target, FunctionType) or target.__closure__ is None:
        return {}
    names = (f"({name})" for name in target.__code__.co_freevars)
    return dict(zip(names, target.__closure__, strict=True))


def code_of(roots: Sequence[Root]) -> list[Root]:
    """Return the user's classes that define the objects, and the modules that contain them."""
    found: dict[int, Root] = {}
    own = packages_of(roots)
    for root in roots:
        parts = root.target.modules() if _is_module(root.target) else [root.target]
        kinds = (kind for part in parts for kind in type(part).__mro__)
        for kind in kinds:
            if kind.__module__.partition(".")[0] not in own:
                continue
            made = replace(root, ignored=(), is_trained=False)
            name = f"{kind.__module__}.{kind.__qualname__}"
            found.setdefault(id(kind), replace(made, name=name, target=kind, key="class"))
            if (module := sys.modules.get(kind.__module__)) is not None:
                found.setdefault(id(module), replace(made, name=module.__name__, target=module, key="module"))
    return list(found.values())


def packages_of(roots: Iterable[Root]) -> set[str]:
    """Return the packages of the classes of the objects: they are the user's, wherever they are installed."""
    return {type(root.target).__module__.partition(".")[0] for root in roots} - ALWAYS_LIBRARIES


def why_not_saved(member: Member, max_bytes: int) -> str:
    """Return why checkpoints do not contain a member; empty: they can."""
    if member.kind not in ("plain", "own") or not is_plain(member.value):
        return f"a {type(member.value).__name__}"
    size_bytes = size_of(member.value)
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes > max_bytes else ""


def size_of(value: Any) -> int:
    """Return the approximate size of a plain value in bytes."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if is_tensor(value):
        return int(value.numel() * value.element_size())
    if isinstance(value, Mapping):
        return 16 + sum(size_of(each) for each in value.values()) + 16 * len(value)
    if isinstance(value, list | tuple | set | frozenset) or hasattr(value, "maxlen"):
        return 16 + sum(map(size_of, value))
    return 8


def text_of(value: object) -> str:
    """Return a number as text, or the type of another value, which may be confidential."""
    if isinstance(value, bool | int | float | complex | np.generic):
        return str(value)
    if is_tensor(value) or isinstance(value, np.ndarray):
        shape = list(value.shape)  # type: ignore[attr-defined]
        return f"an array of shape {shape}" if shape else str(value.item())  # type: ignore[attr-defined]
    return f"a {type(value).__name__}"


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _is_scratch(value: Any) -> bool:
    """Return whether a value is a tensor with a gradient, or contains only such tensors."""
    if type(value) in (list, tuple, dict) and 0 < len(value) <= MAX_LENGTH:
        inner = value.values() if type(value) is dict else value
        return all(is_tensor(each) and each.requires_grad for each in inner)
    return is_tensor(value) and bool(value.requires_grad)


def _saves_itself(value: object) -> bool:
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(type(value), name, None)) for name in names)


def _hidden_buffers(module: Any) -> set[str]:
    """Return the names of a module's own buffers that its ``state_dict`` does not contain."""
    names: set[str] = module._non_persistent_buffers_set  # noqa: SLF001  (no public API)
    return {name for name in names if getattr(module, name, None) is not None}


def _ids_of_weights(model: Any) -> Iterator[int]:
    """Yield the ids of the parameters and buffers that a model's checkpoint contains."""
    yield from map(id, model.parameters())
    for module in model.modules():
        hidden = _hidden_buffers(module)
        yield from (id(each) for name, each in module.named_buffers(recurse=False) if name not in hidden)
