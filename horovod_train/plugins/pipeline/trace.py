"""Trace the code between a model's modules into a graph that calls these modules.

    trace            the graph of a model's calls
    lengths_seen     lengths and numbers of inputs in traced code: traced if possible, otherwise required to
                     be constant (``same_length``, ``same_number``)
    refused_code     the error for code whose effect a trace would not contain

Stages call the model's own modules, whose ``forward`` runs unchanged. Only the ``forward`` of opened
modules is traced, because a stage may end inside them: the model itself, and the modules that contain its
layers. ``torch.fx`` alone fails at each ``if`` and each loop over a shape. The tracer of this module also
computes an example, and follows its branches. The graph checks that each batch takes the same branches.

A trace contains only operations on tensors. Other effects would be lost: changing the mode of autograd,
storing a value in Python, drawing a random number that does not depend on the input, or reading a weight
other than by its attribute. Code with such effects is refused with its line.
"""

from __future__ import annotations

import builtins
import inspect
import linecache
import operator
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
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
from horovod_train.frameworks.torch.state.rank_state import PLAIN, python_state

VALUE = "horovod_train.value"
"""Key in ``node.meta`` of the node's value for the example batch."""
PARTS_HINT = (
    "give the task a method pipeline_parts(model) that returns modules which, called one after the other, "
    "are the model"
)


def same_branch(condition: object, was_taken: bool) -> None:
    """Refuse a batch for which the model's code would take another branch; called by graphs."""
    if bool(condition) != was_taken:
        raise UserError(
            "strategy pipeline: the model's code branches by the shape or value of an input, and "
            "this batch takes "
            "another branch than the one with which the model was cut into stages",
            hint=PARTS_HINT,
        )


def same_length(sized: Sized, length: int) -> None:
    """Refuse a batch in which a value has another length than in the example; called by graphs."""
    same_branch(len(sized) == length, was_taken=True)


def same_number(number: Any, expected: int) -> None:
    """Refuse a batch in which a number differs from that of the example; called by graphs."""
    same_branch(operator.index(number) == expected, was_taken=True)


@contextmanager
def lengths_seen(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Replace ``len`` in the namespaces of modules, during the block, by a function that can be traced.

    Code such as ``h.expand(len(x), -1)`` is common, and the number of samples of a batch may vary.
    """
    found = [getattr(type(module).forward, "__globals__", {}) for module in modules]
    namespaces = [each for each in found if not str(each.get("__name__", "torch")).startswith("torch")]
    own = [(each, each["len"]) for each in namespaces if "len" in each]
    for each in namespaces:
        each["len"] = _length
    try:
        yield
    finally:
        for each in namespaces:
            each.pop("len", None)
        for each, length in own:
            each["len"] = length


def _length(sized: Any) -> Any:
    is_traced = isinstance(sized, fx.Proxy) and isinstance(sized.node.meta.get(VALUE), torch.Tensor)
    return sized.size(0) if is_traced else builtins.len(sized)


FACTORY_FUNCTIONS = ("arange", "zeros", "ones", "full", "empty", "linspace", "eye")
"""Functions that create tensors from numbers, which ``torch.fx`` does not trace."""
IS_RANDOM = "horovod_train.is_random"
"""Key in ``node.meta``: whether the node has drawn random numbers for the example."""
ENTRY = "_horovod_train_entry"
INSIDE_HINT = (
    "move this code into a separate module, whose forward() a stage runs unchanged, or give the "
    "task a method "
    "pipeline_parts(model)"
)


def trace(model: torch.nn.Module, example: Mapping[str, Any], opened: Collection[str] = ()) -> fx.Graph:
    """Return the graph of a model's calls.

    The model is traced in training and in evaluation mode. The two traces may differ only in arguments of
    functions, as in ``dropout(x, p, self.training)``. Tracing draws random numbers, and changes the state of
    modules. The caller must therefore pass a copy of the model.

    Args:
        model: The model.
        example: Example inputs, by the names of ``forward``'s parameters.
        opened: Names of modules whose ``forward`` is traced, in addition to the model's.

    Raises:
        UserError: Control flow depends on the contents of a tensor, or the code cannot be traced for another
            reason.
    """
    was_training = model.training
    try:
        graphs = [_traced(model.train(mode), example, opened) for mode in (True, False)]
    finally:
        model.train(was_training)
    _merge_modes(model, *graphs)
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
            _UntracedOperationCheck(tracer, weights),
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
    """Return the attributes of modules except weights, buffers and modules, as strings for comparison."""
    found = {}
    for name, module in modules.items():
        for key, value in vars(module).items():
            if not key.startswith("_") and key != "training" and not isinstance(value, torch.nn.Module):
                found[f"{name}.{key}".removeprefix(".")] = python_state(value)
    return found


def plain_attributes(module: torch.nn.Module) -> dict[str, object]:
    """Return the attributes of a module that are numbers or strings, whose values a trace contains."""
    return {key: v for key, v in vars(module).items() if isinstance(v, PLAIN) and key != "training"}


def changed_attribute(before: Mapping[str, str], after: Mapping[str, str]) -> str | None:
    """Return the name of an attribute that has changed; None if there is none."""
    return next((name for name in sorted({*before, *after}) if before.get(name) != after.get(name)), None)


def refused_code(what: str) -> UserError:
    """Return the error for code between modules whose effect (``what``) a trace would not contain."""
    return UserError(
        f"strategy pipeline: the model cannot be cut into stages: its code between modules {what}"
        f"{_place_in(traceback.extract_stack())}",
        hint=INSIDE_HINT,
    )


def _place_of(trace_back: TracebackType | None) -> str:
    return _place_in(traceback.extract_tb(trace_back))


def _place_in(frames: traceback.StackSummary) -> str:
    """Return the innermost line outside of PyTorch and this package, for an error message."""
    of_others = ("/torch/", "/horovod_train/frameworks/", "<eval_with_key>", "<string>")
    for frame in reversed(frames):
        if not any(part in frame.filename for part in of_others):
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f" ({frame.filename}, line {frame.lineno}: {line})"
    return ""


def _check_hooks(name: str, module: torch.nn.Module) -> None:
    """Refuse backward hooks on an opened module, because stages do not call it."""
    if module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001  (no public API)
        raise UserError(
            f"strategy pipeline: {name or 'the model'} has a backward hook, which would not be "
            "called, because stages replace this module",
            hint="register the hook with a module inside of a stage, or use strategy: fsdp or allreduce",
        )


def _merge_modes(model: torch.nn.Module, training: fx.Graph, evaluation: fx.Graph) -> None:
    """Replace arguments that differ between the two graphs, in the first one, by the model's ``training``.

    Raises:
        UserError: The graphs have other differences than True in training and False in evaluation.
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
    each = iter(which)
    return map_aggregate(arguments, lambda old: leaf if next(each) else old)


class _Traced(fx.Proxy):
    """Proxy with the length of the example's value, which the graph checks for each batch."""

    def __len__(self) -> int:
        length = len(self.node.meta[VALUE])
        self.tracer.create_proxy("call_function", same_length, (self, length), {})
        return length

    def __index__(self) -> int:
        """Return the example's number, such as the bound of a loop, which the graph checks for each batch."""
        number = operator.index(self.node.meta[VALUE])
        self.tracer.create_proxy("call_function", same_number, (self, number), {})
        return number

    def __getattr__(self, name: str) -> Any:
        if name == "shape":  # other attributes may be methods
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)


class _Tracer(fx.Tracer):
    """Tracer that also computes each node for the example, whose inputs are in the order of placeholders."""

    proxy_buffer_attributes = True

    def __init__(self, example: Sequence[Any], opened: Collection[str]) -> None:
        super().__init__()
        self.traced_func_name = ENTRY
        self._example = list(example)
        self._opened = frozenset(opened)
        self._modes = modes()
        self.is_computing = False

    def trace(self, *args: Any, **more: Any) -> fx.Graph:
        """Trace a model in the current modes of autograd and autocast."""
        self._modes = modes()
        return super().trace(*args, **more)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy of a node."""
        return _Traced(node, self)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is called unchanged, because it is not opened."""
        return module_qualified_name not in self._opened

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        """Create a node, and compute it for the example."""
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
        """Call the module itself while the example is computed; otherwise, trace the call."""
        if self.is_computing:
            return _orig_module_call(m, *args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return the attribute itself while the example is computed; otherwise, proxies of weights."""
        return attr_val if self.is_computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return the example's branch, which the graph checks for each batch; refuse branches by a tensor."""
        value = obj.node.meta[VALUE]
        if isinstance(value, torch.Tensor):
            raise refused_code("decides by the numbers of a tensor")
        self.create_proxy("call_function", same_branch, (obj, bool(value)), {})
        return bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Return an iterator with as many elements as the example's value."""
        value = obj.node.meta[VALUE]
        if isinstance(value, tuple | list | torch.Size):
            return iter([obj[at] for at in range(len(value))])  # type: ignore[index]
        return iter(super().iter(obj))


def modes() -> tuple[object, ...]:
    """Return the modes of autograd and autocast."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(device) for device in ("cpu", "cuda")),
    )


class _UntracedOperationCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Check of operations on tensors that depend on no input, which the tracer does not record.

    Their results become constants of the graph, which is correct only if they are equal for each batch.
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
    """Add a method to the model's class, during the block, that calls the model with only these inputs.

    Without it, the tracer would treat other parameters of ``forward``, which have defaults, as inputs. The
    model's hooks are called. Inputs are passed by position if they are the first parameters of ``forward``.
    """
    made: dict[str, Any] = {"_call_module": _orig_module_call}
    parameters = list(inspect.signature(model.forward).parameters.values())
    first = [each.name for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    given = ", ".join(
        name if first[at : at + 1] == [name] else f"{name}={name}" for at, name in enumerate(names)
    )
    # The names are valid identifiers, because they are parameter names.
    exec(f"def entry(self, {', '.join(names)}): return _call_module(self, {given})", made)  # noqa: S102
    kind = type(model)
    setattr(kind, ENTRY, made["entry"])
    try:
        yield
    finally:
        delattr(kind, ENTRY)


@contextmanager
def _makers_seen_by(tracer: _Tracer) -> Iterator[None]:
    """Trace functions that create tensors from traced numbers, during the block."""
    before = {name: getattr(torch, name) for name in FACTORY_FUNCTIONS}

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
    """Record calls of ``torch.autograd.Function`` as single nodes, during the block."""
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


@cache  # nodes of the two traces are compared, and must have the same function
def _applied(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function that applies the class, with the class in its name."""

    def call(*args: Any, **more: Any) -> Any:
        return cls.apply(*args, **more)  # type: ignore[no-untyped-call]

    call.__name__ = call.__qualname__ = f"apply_{cls.__name__}"
    return call


@contextmanager
def _writes_seen_by(tracer: _Tracer, modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Refuse code between modules that sets an attribute of an opened module, during the block."""
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
