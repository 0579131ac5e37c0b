"""Calls of a task whose model is split into stages, and the values that the model's code reads.

    inputs_of_call     inputs with which a task calls its model
    answered_with      result of a task for a given output of the model
    drawing_by_stage   random numbers of a plain model, as those of its stages
    ValuesRead         values in Python that the code between modules reads

Random numbers that a task draws before it calls the model, such as a mask of tokens, must be equal on the
ranks of the first and the last stage. Both therefore use the same seed.
"""

from __future__ import annotations

import dis
import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.reader import mix, seeded_generators
from horovod_train.frameworks.torch.state.rank_state import PLAIN

Function = Callable[[Any, Any], Any]
"""A task's ``loss`` or ``metrics``, which receives a model and a batch."""


class _ModelCalled(BaseException):  # not an Exception, because a task may catch those
    """Signal that the task has called the model."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


class _StandIn:
    """Proxy of a model with read-only attributes, whose call is replaced.

    A task computes its loss by calling the model once. The rank with the first stage needs the inputs of
    this call, and calls the task with a stand-in that records them and aborts the task
    (``inputs_of_call``). The rank with the last stage calls the task with a stand-in that returns the
    output of the pipeline (``answered_with``).
    """

    def __init__(self, model: torch.nn.Module, call: Callable[..., Any]) -> None:
        vars(self).update(_model=model, _call=call, num_calls=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["num_calls"] += 1
        return vars(self)["_call"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UserError(
            f"strategy pipeline: the task sets the attribute {name!r} of the model, whose parts are "
            "on several ranks",
            hint="give it to the model as an input, keep it in a buffer of a module, or use strategy: fsdp",
        )

    def __deepcopy__(self, memo: object) -> Any:
        raise UserError(
            "strategy pipeline: the task copies the model, whose parts are on several ranks",
            hint="use strategy: fsdp or zero",
        )


def inputs_of_call(function: Function, model: torch.nn.Module, batch: Any, seed: int) -> dict[str, Any]:
    """Return the inputs with which a task's function calls the model, by ``forward``'s parameter names.

    Raises:
        UserError: The function does not call the model, or passes inputs to ``*args`` or ``**kwargs``.
    """
    signature = inspect.signature(model.forward)

    def call(*args: Any, **kwargs: Any) -> Any:
        raise _ModelCalled(dict(signature.bind(*args, **kwargs).arguments))

    try:
        with seeded(seed):
            function(_StandIn(model, call), batch)
    except _ModelCalled as found:
        many = [name for name in found.inputs if signature.parameters[name].kind.name.startswith("VAR_")]
        if many:
            raise UserError(
                f"strategy pipeline: {type(model).__name__}.forward takes *{many[0]}",
                hint="give each input of the model a name",
            ) from None
        return found.inputs
    raise UserError(
        "strategy pipeline: the task computes without calling the model",
        hint="call the model itself, once: model(inputs); not one of its methods or parts",
    )


def answered_with(function: Function, model: torch.nn.Module, batch: Any, output: Any, seed: int) -> Any:
    """Return the result of a task's function for a given output of the model.

    Raises:
        UserError: The function does not call the model exactly once.
    """
    stand_in = _StandIn(model, lambda *_, **__: output)
    with seeded(seed):
        found = function(stand_in, batch)
    if stand_in.num_calls != 1:
        raise UserError(
            f"strategy pipeline: the task calls the model {stand_in.num_calls} times for a batch",
            hint="call it once, with all inputs",
        )
    return found


def seed_of_stage(seed: int, stage: int) -> int:
    """Return the seed of a stage's forward pass, given the seed of the micro-batch."""
    return mix(seed, stage, 1) % 2**63


def generators() -> Callable[[], None]:
    """Return a function that restores the present state of this rank's random generators."""
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def set_back() -> None:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.set_rng_state(saved[2])
        if on_device is not None:
            torch.cuda.set_rng_state(on_device)

    return set_back


def seed_all(seed: int) -> None:
    """Seed all random generators of this rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _refuse_script_modules(model: torch.nn.Module, names: Iterable[str]) -> None:
    for name in names:
        if isinstance(model.get_submodule(name), torch.jit.ScriptModule):
            raise UserError(
                f"strategy pipeline: a stage begins with the ScriptModule {name!r}, which cannot have hooks: "
                "the first steps cannot be verified",
                hint="use the module without torch.jit.script, or set health: {verify_strategy: false}",
            )


@contextmanager
def drawing_by_stage(
    model: torch.nn.Module, firsts: Sequence[tuple[str, int] | None]
) -> Iterator[Callable[[int], None]]:
    """Seed the random generators in a plain model's forward pass at the boundaries of stages.

    ``firsts`` contains ``Stage.first`` of each stage. Yields a function that seeds a micro-batch, which must
    be called before the loss of the micro-batch is computed.

    Raises:
        UserError: A stage begins with a ``ScriptModule``, which cannot have hooks.
    """
    names = {first[0] for first in firsts if first is not None}
    _refuse_script_modules(model, names)
    seeds = [0]
    num_calls: Counter[str] = Counter()
    set_back: list[Callable[[], None]] = []

    def begin(seed: int) -> None:
        seeds[0] = seed
        seed_all(seed)

    def model_is_called(*_: object) -> None:
        num_calls.clear()
        set_back.append(generators())
        seed_all(seed_of_stage(seeds[0], 0))

    def module_is_called(name: str, *_: object) -> None:
        if (name, num_calls[name]) in firsts[1:]:
            seed_all(seed_of_stage(seeds[0], firsts.index((name, num_calls[name]), 1)))
        num_calls[name] += 1

    def model_has_returned(*_: object) -> None:
        if set_back:
            set_back.pop()()

    hooks = [model.register_forward_pre_hook(model_is_called, prepend=True)]
    for name in names:
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(partial(module_is_called, name), prepend=True))
    hooks.append(model.register_forward_hook(model_has_returned, always_call=True))
    try:
        yield begin
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all random generators of this rank during the block, and restore their states after it."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices), seeded_generators(seed):
        torch.manual_seed(seed)
        yield


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

    A trace contains the values of its time. Python does not report reads of attributes. Values are
    therefore found from the code: the functions that the ``forward`` of an opened module may reach refer to
    attributes, keys, global variables and variables of enclosing functions by name, and the objects behind
    them are walked over.

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
