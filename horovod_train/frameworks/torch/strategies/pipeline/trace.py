"""Tracing how a model calls its modules: in which order, with what, and what becomes of the results.

Stages call the model's own modules, whose ``forward`` runs unchanged. Only the code between them is traced:
the ``forward`` of those modules that are opened, because a stage may end inside of them (the model itself,
and what holds its layers). ``torch.fx`` alone would stop at each ``if`` and each loop over a shape; the
tracer here computes an example along, so that it knows which branch to take, and each batch is checked for
taking the same one.

A trace keeps operations on tensors, and nothing else. Code that does more (changes the mode of autograd,
keeps a value in Python, draws a random number that does not depend on the input, reads a weight past its
attribute) would be lost, and is refused with its line.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import fx
from torch.fx._symbolic_trace import _orig_module_call
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.state.python_state import PLAIN, python_state
from horovod_train.frameworks.torch.strategies.pipeline.lengths import (
    PARTS_HINT,
    VALUE,
    lengths_seen,
    same_branch,
    same_length,
    same_number,
)

MAKERS = ("arange", "zeros", "ones", "full", "empty", "linspace", "eye")
"""Functions that make tensors from numbers: a tracer sees only registered ones."""
IS_RANDOM = "horovod_train.is_random"
"""Whether a node drew random numbers for the example."""
ENTRY = "_horovod_train_entry"
INSIDE_HINT = (
    "move this code into a separate module, whose forward() a stage runs unchanged, or give the "
    "task a method "
    "pipeline_parts(model)"
)


def trace(model: torch.nn.Module, example: Mapping[str, Any], opened: Collection[str] = ()) -> fx.Graph:
    """Return what a model calls, with an example of its inputs by the names of ``forward``'s parameters.

    It is traced in training and in evaluation, which must differ by the arguments of functions alone
    (``dropout(x, p, self.training)``). The example draws random numbers, and changes what modules keep:
    give a copy of the model.

    Args:
        model: The model.
        example: Its inputs.
        opened: Names of modules whose ``forward`` is traced, besides that of the model.

    Raises:
        UserError: It decides by what its tensors hold, or its code cannot be traced for another reason.
    """
    was_training = model.training
    try:
        graphs = [_traced(model.train(mode), example, opened) for mode in (True, False)]
    finally:
        model.train(was_training)
    _join_modes(model, *graphs)
    return graphs[0]


def _traced(model: torch.nn.Module, example: Mapping[str, Any], opened: Collection[str]) -> fx.Graph:
    tracer = _Tracer(list(example.values()), opened)
    modules = {"": model} | {name: model.get_submodule(name) for name in opened}
    for name, module in modules.items():
        _check_hooks(name, module)
    before = attributes_of(modules)
    weights = {id(t) for t in (*model.parameters(), *model.buffers())}
    try:
        with (
            _makers_seen_by(tracer),
            _functions_seen_by(tracer),
            _writes_seen_by(tracer, modules),
            lengths_seen(modules.values()),
            _entered(model, list(example)),
            _Glue(tracer, weights),
            torch.set_grad_enabled(model.training),
        ):
            graph = tracer.trace(model)
    except UserError:
        raise
    except (
        fx.proxy.TraceError,
        TypeError,
        RuntimeError,
        AttributeError,
        ValueError,
        NameError,
        KeyError,
    ) as error:
        raise UserError(
            f"strategy pipeline: {type(model).__name__} cannot be cut into "
            f"stages{_place_of(error.__traceback__)}: "
            f"{type(error).__name__}: {error}",
            hint=PARTS_HINT,
        ) from error
    if (changed := changed_attribute(before, attributes_of(modules))) is not None:
        raise refused_code(f"changes {changed}, which a trace does not keep")
    return graph


def attributes_of(modules: Mapping[str, torch.nn.Module]) -> dict[str, str]:
    """Return what modules keep in Python, besides weights, buffers and modules; as texts to compare."""
    found = {}
    for name, module in modules.items():
        for key, value in vars(module).items():
            if not key.startswith("_") and key != "training" and not isinstance(value, torch.nn.Module):
                found[f"{name}.{key}".removeprefix(".")] = python_state(value)
    return found


def plain_attributes(module: torch.nn.Module) -> dict[str, object]:
    """Return the numbers and texts that a module keeps: code between modules reads them when it is traced."""
    return {key: v for key, v in vars(module).items() if isinstance(v, PLAIN) and key != "training"}


def changed_attribute(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """Return the name of an attribute that is not as it was; None: there is none."""
    return next((name for name in sorted({*before, *after}) if before.get(name) != after.get(name)), None)


def refused_code(what: str) -> UserError:
    """Return the error of code between modules that a trace would lose.

    Args:
        what: What it does.
    """
    return UserError(
        f"strategy pipeline: the model cannot be cut into stages: its code between modules {what}"
        f"{_place_in(traceback.extract_stack())}",
        hint=INSIDE_HINT,
    )


def _place_of(trace_back: TracebackType | None) -> str:
    return _place_in(traceback.extract_tb(trace_back))


def _place_in(frames: traceback.StackSummary) -> str:
    """Return the innermost line that is neither PyTorch's nor of this package, for a message."""
    of_others = ("/torch/", "/horovod_train/frameworks/", "<eval_with_key>", "<string>")
    for frame in reversed(frames):
        if not any(part in frame.filename for part in of_others):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f" ({frame.filename}, line {frame.lineno}: {line})"
    return ""


def _check_hooks(name: str, module: torch.nn.Module) -> None:
    """Refuse hooks of the backward pass on a module that is not called as a whole."""
    if module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001  (no public API)
        raise UserError(
            f"strategy pipeline: {name or 'the model'} has a backward hook, and is cut into stages, "
            "which are called "
            "in its place",
            hint="register the hook with a module inside of a stage, or use strategy: fsdp or allreduce",
        )


def _join_modes(model: torch.nn.Module, training: fx.Graph, evaluation: fx.Graph) -> None:
    """Let the first graph ask for the mode where the two were traced with True and False.

    Raises:
        UserError: They differ by more.
    """
    twins: dict[fx.Node, fx.Node] = dict(zip(evaluation.nodes, training.nodes, strict=False))
    same = len(training.nodes) == len(evaluation.nodes)
    for theirs, own in list(twins.items()):
        own_leaves = _leaves((own.args, own.kwargs))
        their_leaves = _leaves(fx.node.map_arg((theirs.args, theirs.kwargs), twins.__getitem__))
        pairs = list(zip(own_leaves, their_leaves, strict=False))
        is_mode = [one is True and other is False for one, other in pairs]
        same = same and (own.op, own.target, len(own_leaves)) == (theirs.op, theirs.target, len(their_leaves))
        same = same and all(mode or one == other for mode, (one, other) in zip(is_mode, pairs, strict=True))
        if same and any(is_mode):
            with training.inserting_before(own):
                flag = training.get_attr("training")
            flag.meta[VALUE] = True
            own.args, own.kwargs = _replaced((own.args, own.kwargs), is_mode, flag)
    if not same:
        raise UserError(
            f"strategy pipeline: {type(model).__name__} calls other modules in training than in evaluation",
            hint=PARTS_HINT,
        )


def _leaves(arguments: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(arguments, found.append)
    return found


def _replaced(arguments: Any, which: Sequence[bool], leaf: fx.Node) -> Any:
    """Replace modules by leaves."""
    each = iter(which)
    return map_aggregate(arguments, lambda old: leaf if next(each) else old)


class _Traced(fx.Proxy):
    """A value that has the length of the example."""

    def __len__(self) -> int:
        length = len(self.node.meta[VALUE])
        self.tracer.create_proxy("call_function", same_length, (self, length), {})
        return length

    def __index__(self) -> int:
        """Return a number as the code of a loop wants it."""
        number = operator.index(self.node.meta[VALUE])
        self.tracer.create_proxy("call_function", same_number, (self, number), {})
        return number

    def __getattr__(self, name: str) -> Any:
        if name == "shape":  # others may be methods, which are called
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)


class _Tracer(fx.Tracer):
    """Computes the example along with the trace.

    Args:
        example: Inputs, in the order of placeholders.
        opened: Names of modules whose ``forward`` is traced.
    """

    proxy_buffer_attributes = True

    def __init__(self, example: Sequence[Any], opened: Collection[str]) -> None:
        super().__init__()
        self.traced_func_name = ENTRY
        self._example = list(example)
        self._opened = frozenset(opened)
        self._modes = modes()
        self.is_computing = False

    def trace(self, *args: Any, **more: Any) -> fx.Graph:
        """Trace."""
        self._modes = modes()
        return super().trace(*args, **more)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for a node while the model's code runs."""
        return _Traced(node, self)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is called unchanged: all except opened ones."""
        return module_qualified_name not in self._opened

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        """Make a node, and compute it for the example."""
        if kind.startswith("call") and modes() != self._modes and not self.is_computing:
            raise refused_code("changes the mode of autograd or autocast")
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        node = proxy.node
        own_args, own_kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get(VALUE))
        was_computing, self.is_computing = self.is_computing, True
        drawn = torch.get_rng_state()
        try:
            node.meta[VALUE] = self._computed(kind, target, own_args, own_kwargs)
        finally:
            self.is_computing = was_computing
        node.meta[IS_RANDOM] = not torch.equal(drawn, torch.get_rng_state())
        return proxy

    def _computed(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "placeholder":
            return self._example.pop(0)
        if kind == "get_attr":
            module, _, name = target.rpartition(".")
            return getattr(self.root.get_submodule(module), name)
        if kind == "call_function":
            return target(*args, **kwargs)
        if kind == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if kind == "call_module":
            return _orig_module_call(self.root.get_submodule(target), *args, **kwargs)
        return None

    def call_module(self, m: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a module; unchanged while the example is computed."""
        if self.is_computing:
            return _orig_module_call(m, *args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return a parameter: while the example is computed, itself."""
        return attr_val if self.is_computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Take the example's branch, and look at each batch whether it is the same; never by a tensor."""
        value = obj.node.meta[VALUE]
        if isinstance(value, torch.Tensor):
            raise refused_code("decides by the numbers of a tensor")
        self.create_proxy("call_function", same_branch, (obj, bool(value)), {})
        return bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Unpack what the example unpacks to."""
        value = obj.node.meta[VALUE]
        if isinstance(value, tuple | list | torch.Size):
            return iter([obj[at] for at in range(len(value))])  # type: ignore[index]
        return iter(super().iter(obj))


def modes() -> tuple[object, ...]:
    """Return the modes of PyTorch that decide what an operation does and what autograd records."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(device) for device in ("cpu", "cuda")),
    )


class _Glue(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operations that code between modules makes without the tracer: on tensors that depend on no input.

    Their results become constants of the graph. That is right where they are the same for each batch.
    """

    def __init__(self, tracer: _Tracer, weights: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer, self._weights = tracer, weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._tracer.is_computing:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise refused_code("draws random numbers, which would be the same for each batch")
            if any(id(leaf) in self._weights for leaf in tree_leaves((args, kwargs))):
                raise refused_code("computes with weights or buffers past their attributes")
        return func(*args, **(kwargs or {}))


@contextmanager
def _entered(model: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Give a model's class a method that calls it with these inputs alone, while the block runs.

    What else ``forward`` takes keeps its default. A tracer would take a default for an input. The model's
    own hooks are called, with inputs by position where they are the first parameters of ``forward``.
    """
    made: dict[str, Any] = {"call": _orig_module_call}
    parameters = list(inspect.signature(model.forward).parameters.values())
    first = [each.name for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    given = ", ".join(
        name if first[at : at + 1] == [name] else f"{name}={name}" for at, name in enumerate(names)
    )
    # The names are those of parameters in Python.
    exec(f"def entry(self, {', '.join(names)}): return call(self, {given})", made)  # noqa: S102
    kind = type(model)
    setattr(kind, ENTRY, made["entry"])
    try:
        yield
    finally:
        delattr(kind, ENTRY)


@contextmanager
def _makers_seen_by(tracer: _Tracer) -> Iterator[None]:
    """Let functions that make tensors from traced numbers be traced, while the block runs."""
    before = {name: getattr(torch, name) for name in MAKERS}

    def seen(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_traced = any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs)))
            if is_traced and not tracer.is_computing:
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return call

    for name, function in before.items():
        setattr(torch, name, seen(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)


@contextmanager
def _functions_seen_by(tracer: _Tracer) -> Iterator[None]:
    """Let functions with their own backward pass be called unchanged, while the block runs."""
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **more: Any) -> Any:
        plain = before.__get__(None, cls)
        if tracer.is_computing or not any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, more))):
            return plain(*args, **more)
        return tracer.create_proxy("call_function", _applied(cls), args, more)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]


@cache  # the same for a class in every trace, which are compared
def _applied(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function of the class's own name that applies it."""

    def call(*args: Any, **more: Any) -> Any:
        return cls.apply(*args, **more)  # type: ignore[no-untyped-call]

    call.__name__ = call.__qualname__ = f"apply_{cls.__name__}"
    return call


@contextmanager
def _writes_seen_by(tracer: _Tracer, modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Refuse code between modules that sets an attribute of a module, while the block runs."""
    before = torch.nn.Module.__setattr__
    names = {id(module): name or "the model" for name, module in modules.items()}

    def set_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
        if not tracer.is_computing and id(module) in names:
            raise refused_code(f"sets the attribute {name!r} of {names[id(module)]}")
        before(module, name, value)

    torch.nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.__setattr__ = before  # type: ignore[method-assign]
