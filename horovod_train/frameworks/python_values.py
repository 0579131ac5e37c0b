"""Values of the state in Python of an object: found by walking over attributes, and set by their paths."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import FrozenInstanceError, dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from horovod_train.frameworks.plain_data import (
    decoded,
    fingerprint,
    is_generator,
    is_plain,
    is_tensor,
    members,
)

MAX_DEPTH = 6
MAX_VALUES = 10_000
"""Number of values above which no more attributes are examined."""
MAX_OBJECTS = 1_000
"""Longest container whose elements are examined if they are objects."""
MAX_BYTES = 2**28
"""Size of the largest value of a task or model that is saved."""
MAX_BYTES_OF_DATA = 2**20
"""The same for a data set, whose changing attributes are mostly caches."""
MAX_SMALL_BYTES = 2**16
LIBRARIES = frozenset(sys.stdlib_module_names) - {"types"} | {
    "torch", "numpy", "horovod", "horovod_train", "lightning", "pytorch_lightning", "torchmetrics", "keras",
    "tensorflow", "jax", "jaxlib", "flax", "optax", "mxnet", "transformers", "tokenizers", "datasets",
    "torchvision", "mpi4py", "deepspeed", "PIL", "pandas", "h5py", "psutil", "tensorboard", "wandb", "mlflow",
}  # fmt: skip
"""Packages whose objects are examined only if they have ``state_dict`` and ``load_state_dict``."""

Step = tuple[str, Any]
"""Part of a path: ("attribute", name) or ("item", key or index)."""


@dataclass(frozen=True)
class Value:
    """A value of the state.

    Attributes:
        root: Name of the object that contains it, such as ``task``.
        path: Attributes and items from this object to the value.
        content: The value, or the result of ``state_dict()``.
        max_bytes: Size above which the value is not saved.
        is_shared: All ranks should have the same value.
    """

    root: str
    path: tuple[Step, ...]
    content: Any
    max_bytes: int = MAX_BYTES
    is_shared: bool = True

    @property
    def name(self) -> str:
        """Path as it is written in Python."""
        parts = (f".{key}" if kind == "attribute" else f"[{key!r}]" for kind, key in self.path)
        return self.root + "".join(parts)


@dataclass(frozen=True)
class Root:
    """An object whose state is saved.

    Attributes:
        name: Name in messages, such as ``task``.
        target: The object.
        ignored: Names of attributes that are not examined: those of the framework's base class.
        is_trained: The object is the trained model, whose weights and buffers are saved elsewhere.
        is_shared: All ranks should have the same state; not so for data sets, and for parts of a model.
        max_bytes: Size above which a value is not saved.
    """

    name: str
    target: Any
    ignored: Collection[str] = ()
    is_trained: bool = False
    is_shared: bool = True
    max_bytes: int = MAX_BYTES


def walk(root: Root, seen: set[int]) -> Iterator[Value]:
    """Yield the values of an object, except those of objects whose ids are in ``seen``, which is extended."""
    make = partial(Value, root.name, max_bytes=root.max_bytes, is_shared=root.is_shared)
    if isinstance(root.target, type | ModuleType):
        for name, value in list(vars(root.target).items()):
            if not name.startswith("__") and is_plain_by_sample(value):
                yield make((("attribute", name),), value)
    elif _saves_itself(root.target) and not _is_module(root.target):
        seen.add(id(root.target))
        yield make((), root.target.state_dict())
    else:
        yield from _children(root.target, (), make, seen, MAX_DEPTH, root)


def _children(
    target: Any, path: tuple[Step, ...], make: Callable[..., Value], seen: set[int], depth: int, root: Root
) -> Iterator[Value]:
    """Yield the values of the attributes of an object, or of the elements of a container of objects."""
    if id(target) in seen or depth < 0:
        return
    seen.add(id(target))
    if _is_module(target):
        yield from _of_module(target, path, make, seen, depth, root)
        return
    steps: Iterable[tuple[Step, Any]] = ()
    if isinstance(target, list | tuple | deque | dict) and len(target) > MAX_OBJECTS:
        return
    if isinstance(target, list | tuple | deque):
        steps = [(("item", place), each) for place, each in enumerate(target)]
    elif isinstance(target, dict):
        steps = [(("item", key), each) for key, each in target.items() if isinstance(key, str | int)]
    elif hasattr(target, "__dict__"):
        steps = [
            (("attribute", name), each) for name, each in vars(target).items() if name not in root.ignored
        ]
    for step, each in list(steps):
        yield from _of_value(each, (*path, step), make, seen, depth, root)


def _of_value(
    value: Any,
    path: tuple[Step, ...],
    make: Callable[..., Value],
    seen: set[int],
    depth: int,
    root: Root,
) -> Iterator[Value]:
    if id(value) in seen:
        return
    if is_plain_by_sample(value):
        yield make(path, value)
    elif _is_iterator(value):
        yield make(path, value, is_shared=False)
    elif _saves_itself(value) and not (_is_module(value) and root.is_trained):
        seen.add(id(value))
        seen.update(map(id, value.modules() if _is_module(value) else ()))
        yield make(path, value.state_dict())
    elif _is_module(value) or isinstance(value, list | tuple | deque | dict) or _is_of_user(value):
        yield from _children(value, path, make, seen, depth - 1, root)


def _of_module(
    module: Any, path: tuple[Step, ...], make: Callable[..., Value], seen: set[int], depth: int, root: Root
) -> Iterator[Value]:
    """Yield the values of a PyTorch module: attributes, and buffers that checkpoints do not contain."""
    hidden = module._non_persistent_buffers_set  # noqa: SLF001  (no public API)
    for name, buffer in module._buffers.items():  # noqa: SLF001
        if name in hidden and buffer is not None:
            step: Step = ("attribute", name)
            yield make((*path, step), buffer, is_shared=False)
    for name, each in list(vars(module).items()):
        step = ("attribute", name)
        if name not in root.ignored:
            yield from _of_value(each, (*path, step), make, seen, depth, root)
    for name, child in module.named_children():
        yield from _children(child, (*path, ("attribute", name)), make, seen, depth, root)


def code_of(roots: Sequence[Root]) -> list[Root]:
    """Return the user's classes that define the objects, and the modules that contain them."""
    found: dict[int, Root] = {}
    for root in roots:
        parts = root.target.modules() if _is_module(root.target) else [root.target]
        classes = (kind for part in parts for kind in type(part).__mro__ if not _is_of_library(kind))
        for kind in classes:
            found.setdefault(id(kind), replace(root, name=kind.__qualname__, target=kind))
            if (module := sys.modules.get(kind.__module__)) is not None:
                found.setdefault(id(module), replace(root, name=module.__name__, target=module))
    return list(found.values())


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _is_iterator(value: object) -> bool:
    return callable(getattr(value, "__next__", None)) and not hasattr(value, "fileno")


def _saves_itself(value: object) -> bool:
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES


def _is_of_user(value: object) -> bool:
    if isinstance(value, type | ModuleType):
        return False
    return hasattr(value, "__dict__") and not _is_of_library(type(value))


def is_plain_by_sample(value: object) -> bool:
    """Return whether checkpoints can contain a value, from some elements of long containers."""
    return is_plain(value, by_sample=True)


def local_text(value: Value) -> str | None:
    """Return a text that changes with a value; None: it is always taken as changed."""
    if is_plain_by_sample(value.content):
        return fingerprint(value.content, by_identity=True)
    return None if _is_iterator(value.content) else str(id(value.content))


def why_not_saved(value: Value) -> str:
    """Return why checkpoints do not contain a value; empty: they contain it."""
    if not is_plain(value.content):
        return f"a {type(value.content).__name__}"
    size_bytes = _size_bytes(value.content)
    if size_bytes > value.max_bytes:
        return f"{size_bytes / 2**20:.0f} MiB"
    return ""


def is_small(value: object) -> bool:
    """Return whether a plain value is small enough to be copied at any time."""
    return is_generator(value) or _size_bytes(value) <= MAX_SMALL_BYTES


def _size_bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if is_tensor(value):
        return int(value.numel() * value.element_size())
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        return 16 * len(value) + sum(map(_size_bytes, members(value)))
    return 8


def text_of(value: object) -> str:
    """Return a number as text, or the type of another value, which may be confidential."""
    if isinstance(value, bool | int | float | complex | np.generic):
        return str(value)
    if is_tensor(value) or isinstance(value, np.ndarray):
        shape = list(value.shape)  # type: ignore[attr-defined]
        return f"an array of shape {shape}" if shape else str(value.item())  # type: ignore[attr-defined]
    return f"a {type(value).__name__}"


# -- setting


def _set(target: Any, step: Step, value: Any) -> None:
    kind, key = step
    if kind == "attribute":
        try:
            setattr(target, key, value)
        except FrozenInstanceError:
            object.__setattr__(target, key, value)
    elif isinstance(target, list | deque | dict):
        target[key] = value


def restore(target: Any, path: tuple[Step, ...], data: Any) -> bool:
    """Set a value; return whether the path to it exists."""
    for step in path[:-1]:
        if (target := _at(target, step, missing := object())) is missing:
            return False
    old = _at(target, path[-1], None) if path else target
    if _saves_itself(old) and not is_plain(old):
        old.load_state_dict(decoded(data))
        return True
    new = decoded(data, old)
    if new is not old:
        _set(target, path[-1], new)
    return True


def _at(target: Any, step: Step, default: Any) -> Any:
    kind, key = step
    if kind == "attribute":
        return getattr(target, key, default)
    try:
        return target[key]
    except (LookupError, TypeError):
        return default
