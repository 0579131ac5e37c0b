"""State in Python: what training changes besides weights, buffers and the optimizer.

    Walk            finds the objects whose attributes are state, by walking over attributes
    PythonState     saves, compares and restores the state of the objects of a job
    state_of_task   the state of a task, of its data sets, and of models

Attributes of the task, of modules of the model and of data sets, class attributes and module variables of
the user's code may change while a job trains: a counter, a temperature, a queue of embeddings, a generator.
A resumed job must continue with them, and the loss must not depend on values that differ between ranks.

Values that differ from those at the start are saved in each checkpoint, and compared between ranks.
"""

from __future__ import annotations

import copy
import logging
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.base import Communicator, Mesh, allgather_json
from horovod_train.errors import describe_ranks, result_of
from horovod_train.frameworks.plain_data import (
    WHOLE_BYTES,
    decoded,
    encoded,
    fingerprint,
    is_generator,
    is_plain,
    is_tensor,
    packed,
    unpacked,
)

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

    It does not raise because of a user's object: what cannot be examined is opaque, and compared by
    identity.

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


log = logging.getLogger(__name__)

OWN_STATE = "@python/"
"""Prefix of the names of arrays in a checkpoint's state of ranks."""
MAX_RESTORED_BYTES = 2**24
"""Largest value that is copied before passes that must leave no trace."""
IMMUTABLE = {type(None), bool, int, float, complex, str, bytes}
MAX_INITIAL_BYTES = 2**16
"""Largest value whose initial value is kept, for a return to a checkpoint in which it had not changed."""

Place = tuple[str, Path, Key]
"""A member: ID of its root, path of its object, and its key."""


class PythonState:
    """State in Python of the objects of a job.

    The attributes of an object are saved together or not at all: if one of them was replaced by something
    that a checkpoint cannot contain, such as an open file, the others may describe it.

    Created when task, model and data sets exist and no step has been made.

    Args:
        world: All ranks of the job.
        part: Number of the part of the model that this rank has; ranks with the same one are compared.
        roots: The objects; an object that belongs to several of them is a part of the first.

    Attributes:
        not_restored: Values that the checkpoint from which the job has resumed does not contain.
        read: Names of tensors in attributes of modules that passes read before they write them, such as a
            queue of embeddings. They are compared between ranks; others are activations. Equal on all ranks.
    """

    def __init__(self, world: Communicator, roots: Sequence[Root], part: int = 0) -> None:
        self._world, self.part = world, part
        trained = [root for root in roots if root.is_trained]
        self._roots = [*trained, *(root for root in roots if not root.is_trained), *code_of(roots)]
        self._packages = packages_of(roots)
        self.read: set[str] = set()
        # Values stay in memory: a mark may contain an address, which another value must not get.
        self._before = self._walk()
        self._initial = {
            place: copy.deepcopy(encoded(member.value))  # an encoded array is the array itself
            for place, member in _members(self._before)
            if member.kind == "plain" and size_of(member.value) <= MAX_INITIAL_BYTES
        }
        self.not_restored: list[str] = []

    # -- what has changed

    def _walk(self) -> dict[str, Walk]:
        seen: set[int] = set()
        return {root.id: Walk(root, seen, self._packages, self.read) for root in self._roots}

    def changed(self) -> tuple[dict[Place, Member], dict[str, str]]:
        """Return the changed values, and the names of those that cannot be saved with the reason."""
        changed: dict[Place, Member] = {}
        unsaved: dict[str, str] = {}
        now = self._walk()
        for root in self._roots:
            walk, known = now[root.id], self._before[root.id].objects
            if not walk.is_complete:
                unsaved[root.name] = "it has too many objects"
            left = root.max_bytes
            for path, members in walk.objects.items():
                if _is_exchanged(path, walk.objects, known):
                    continue
                of_object, reasons = _changes(members, known.get(path, {}), left)
                left -= sum(size_of(member.value) for member in of_object.values())
                changed |= {(root.id, path, key): member for key, member in of_object.items()}
                unsaved |= reasons if root.is_reported else {}
        return changed, unsaved

    def examined(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return digests of the changed values that ranks should share, and why others are not saved."""
        changed, unsaved = self.changed()
        return _digests(_shared(changed)), unsaved

    def differences(self) -> dict[str, str]:
        """Return a text with the values of two ranks for each value that differs. Collective."""
        shared = _shared(self.changed()[0])
        everyone: list[tuple[int, dict[str, str]]] = allgather_json(
            self._world, (self.part, _digests(shared))
        )
        differing: dict[str, tuple[int, int]] = {}
        firsts: dict[int, int] = {}  # the first rank with each part
        for rank, (part, of_rank) in enumerate(everyone):
            first = firsts.setdefault(part, rank)
            of_first = everyone[first][1]
            for name in of_rank.keys() | of_first.keys():
                if of_rank.get(name) != of_first.get(name):
                    differing.setdefault(name, (first, rank))
        mine = {m.name: text_of(m.value) for m in shared.values() if m.name in differing}
        texts: list[dict[str, str]] = allgather_json(self._world, mine)
        found = {}
        for name in sorted(differing):
            shown = {text for rank in differing[name] if (text := texts[rank].get(name)) is not None}
            if name in self.read and len(shown) > 1:
                continue  # of different shapes: a table that grows with the longest sequence
            values = (
                f"{texts[rank].get(name, 'unchanged')} on {describe_ranks([rank])}"
                for rank in differing[name]
            )
            found[name] = ", ".join(values)
        return found

    # -- checkpoints

    def take(self) -> dict[str, ArrayBlob]:
        """Return the changed values for a checkpoint. Collective.

        Rank 0 returns them all, another rank those that differ from rank 0's.
        """
        changed, unsaved = self.changed()
        mine = _digests(changed)
        of_rank_0 = allgather_json(self._world, mine)[0]
        is_first = self._world.rank == 0
        saved = {
            place: m for place, m in changed.items() if is_first or of_rank_0.get(m.name) != mine[m.name]
        }
        if not saved and not (is_first and unsaved):
            return {}
        values = [[*place, member.value, member.kind] for place, member in saved.items()]
        notes = [f"{name} ({reason})" for name, reason in unsaved.items()]
        return packed({"values": values, "unsaved": notes}, OWN_STATE)

    def load(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> list[dict[str, ArrayBlob]]:
        """Set the values that rank 0 and this rank have saved; return the state of ranks without them.

        Values that had not changed at the checkpoint, and have now, are set to their initial values. A rank
        that did not exist keeps its own random generators.
        """
        rank = self._world.rank
        documents = [unpacked(of_rank, OWN_STATE) for of_rank in of_ranks]
        found = [documents[0] if documents else None, documents[rank] if 0 < rank < len(documents) else None]
        values: dict[Place, tuple[object, str]] = {}
        self.not_restored = []
        for document in filter(None, found):
            self.not_restored += document["unsaved"]
            for root_id, path, key, data, kind in document["values"]:
                values[root_id, tuple(path), key] = data, kind
        for place, member in self.changed()[0].items():
            if place not in values and place in self._initial:
                values[place] = self._initial[place], member.kind
        walks, is_new = self._walk(), rank >= max(1, len(of_ranks))
        for place, (data, kind) in values.items():
            _, problem = result_of(partial(self._restore, walks, place, data, kind, is_new=is_new))
            if problem is not None:
                where = ".".join(map(str, (place[0].partition(" ")[2], *place[1], place[2])))
                self.not_restored.append(f"{where} ({problem})")
        return [{n: blob for n, blob in each.items() if not n.startswith(OWN_STATE)} for each in of_ranks]

    def _restore(
        self, walks: Mapping[str, Walk], place: Place, data: object, kind: str, *, is_new: bool
    ) -> None:
        """Set a value; raises if its object does not exist any more. ``is_new``: this rank had no state."""
        root_id, path, key = place
        target = self._target(root_id, path)
        if kind == "own":
            (target if key is None else _at(target, key)).load_state_dict(decoded(data))
            return
        present = walks[root_id].objects[path].get(key)
        old = None if present is None else present.value
        if is_new and is_generator(old):
            return
        new = decoded(data, old)
        if new is not old:
            _set(target, key, new)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the state of random generators after the block."""
        generators = [m.value for _, m in _members(self._walk()) if is_generator(m.value)]
        before = [encoded(each) for each in generators]
        yield
        for each, data in zip(generators, before, strict=True):
            decoded(data, each)

    def not_restored_values(self) -> tuple[dict[str, Any], list[str]]:
        """Return tensors by name, and names of iterators: ``restored`` leaves them."""
        members = [member for _, member in _members(self._walk_of_code())]
        tensors = {m.name: m.value for m in members if m.kind == "plain" and is_tensor(m.value)}
        return tensors, [each.name for each in members if _is_iterator(each)]

    @contextmanager
    def restored(self, *, with_data: bool = False) -> Iterator[list[str]]:
        """Restore the state in Python of task and models after the block, but not the contents of tensors.

        Args:
            with_data: Also restore that of data sets, which changes when they are read.

        Yields:
            A list that has, after the block, the names of values that were changed and cannot be restored.
        """
        before = self._walk_of_code(with_data=with_data)
        attributes = [
            _Attributes(self._target(root_id, path))
            for root_id, walk in before.items()
            for path in walk.objects
        ]
        contents = {
            place: copy.deepcopy(encoded(member.value))
            for place, member in _members(before)
            if member.kind in ("plain", "own")
            and type(member.value) not in IMMUTABLE
            and not is_tensor(member.value)
            and size_of(member.value) <= MAX_RESTORED_BYTES
        }
        lost: list[str] = []
        try:
            yield lost
        finally:
            for each in attributes:
                each.restore()
            after = self._walk_of_code(with_data=with_data)
            for place, member in _members(before):
                root_id, path, key = place
                now = after[root_id].objects.get(path, {}).get(key)
                if now is None or is_tensor(member.value):
                    continue
                if now.mark == member.mark and size_of(member.value) <= WHOLE_BYTES:
                    continue  # the mark of a larger one contains only a part of it
                if place in contents:
                    self._restore(after, place, contents[place], member.kind, is_new=False)
                else:
                    lost.append(member.name)

    def _walk_of_code(self, *, with_data: bool = False) -> dict[str, Walk]:
        """Walk over the task and the models, and over data sets, which change when they are read."""
        seen: set[int] = set()
        roots = (root for root in self._roots if root.is_reported or with_data)
        return {root.id: Walk(root, seen, self._packages) for root in roots}

    def _target(self, root_id: str, path: Path) -> Any:
        target: Any = next(root.target for root in self._roots if root.id == root_id)
        for step in path:
            target = _at(target, step)
        return target


class _Attributes:
    """The members of an object, to be set again."""

    def __init__(self, target: Any) -> None:
        self._target, self._members = target, dict(_current(target))

    def restore(self) -> None:
        """Set all members that were replaced or removed, and remove those that were added."""
        now = dict(_current(self._target))
        if now.keys() == self._members.keys() and all(
            now[key] is each for key, each in self._members.items()
        ):
            return
        if isinstance(self._target, list):
            self._target[:] = self._members.values()
            return
        for key, value in self._members.items():
            if now.get(key, self) is not value:
                _set(self._target, key, value)
        for key in now.keys() - self._members.keys():
            if isinstance(self._target, dict):
                del self._target[key]
            else:
                delattr(self._target, str(key))


def _current(target: Any) -> Iterator[tuple[str | int, Any]]:
    """Yield the present members of an object; of a module of PyTorch, buffers and modules, too."""
    if isinstance(target, list | tuple):
        yield from enumerate(target)
    elif isinstance(target, dict):
        yield from target.items()
    else:
        yield from ((key, value) for key, value in attributes_of(target) if not key.startswith("__"))
        for name in ("_buffers", "_modules"):
            yield from dict(getattr(target, "__dict__", {}).get(name) or {}).items()


def _set(target: Any, key: Any, value: object) -> None:
    if isinstance(target, dict | list):
        target[key] = value
    elif key in (cells := cells_of(target)):
        cells[key].cell_contents = value
    else:
        setattr(target, key, value)


def _at(target: Any, step: Any) -> Any:
    if isinstance(target, dict | list | tuple):
        return target[step]
    cells = cells_of(target)
    return cells[step].cell_contents if step in cells else getattr(target, step)


def _members(walks: Mapping[str, Walk]) -> Iterator[tuple[Place, Member]]:
    for root_id, walk in walks.items():
        for path, members in walk.objects.items():
            for key, member in members.items():
                yield (root_id, path, key), member


def _is_exchanged(
    path: Path, now: Mapping[Path, Mapping[Key, Member]], known: Mapping[Path, Mapping[Key, Member]]
) -> bool:
    """Return whether an object, or one that contains it, is not the one that was there at the start."""
    for at in range(len(path)):
        above, key = path[:at], path[at]
        if key not in known.get(above, {}) or known[above][key].mark != now[above][key].mark:
            return True
    return False


def _is_iterator(member: Member) -> bool:
    return member.kind == "opaque" and hasattr(type(member.value), "__next__")


def _shared(changed: Mapping[Place, Member]) -> dict[Place, Member]:
    return {place: each for place, each in changed.items() if each.is_shared}


def _digests(changed: Mapping[Place, Member]) -> dict[str, str]:
    return {each.name: fingerprint(each.value, by_identity=False) for each in changed.values()}


def _changes(
    members: Mapping[Key, Member], known: Mapping[Key, Member], max_bytes: int
) -> tuple[dict[Key, Member], dict[str, str]]:
    """Return the changed values of an object; and, if it cannot be saved, the members that prevent it."""
    changed: dict[Key, Member] = {}
    reasons: dict[str, str] = {}
    for key, member in members.items():
        before = known.get(key)
        if "scratch" in (member.kind, "" if before is None else before.kind):
            continue
        is_same = before is not None and (before.kind, before.mark) == (member.kind, member.mark)
        if _is_iterator(member):
            reasons[member.name] = f"a {type(member.value).__name__}"
        elif is_same:
            continue
        elif before is not None and before.kind == "own" == member.kind:
            changed[key] = member
        elif reason := why_not_saved(member, max_bytes):
            reasons[member.name] = reason
        else:
            changed[key] = member
    reasons |= {known[key].name: "it was removed" for key in known.keys() - members.keys()}
    if not reasons:
        return changed, {}
    return {}, reasons | {member.name: "its object is not saved" for member in changed.values()}


def state_of_task(mesh: Mesh, task: object, readers: Sequence[Any], *models: Root) -> PythonState:
    """Return the state in Python of a task, of its data sets, and of models.

    In a model-parallel group, only some ranks call the task or a module: ranks with the same part of the
    model are compared.

    Args:
        mesh: The ranks of the job.
        task: The task.
        readers: Readers of training and evaluation data; None: there is no such data.
        models: Models that PyTorch trains; models of other frameworks have no attributes that change.
    """
    data = [
        Root(name, reader.dataset, is_shared=False, max_bytes=MAX_BYTES_OF_DATA, is_reported=False)
        for name, reader in zip(("train_data", "eval_data"), readers, strict=False)
        if reader is not None
    ]
    _, pipeline, tensor = mesh.axes.place(mesh.world.rank)
    return PythonState(
        mesh.world, [*models, Root("task", task), *data], part=pipeline * mesh.axes.tensor + tensor
    )
