"""Tracing a model with the example of an input: what it calls, in order, and what each call returns.

``torch.fx`` alone would stop at each ``if`` and each loop over a shape. The tracer here computes the example
along, so that it knows which branch to take; each batch is looked at later whether it takes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx._symbolic_trace import _orig_module_call
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from horovod_train.errors import UserError

MAKERS = ("arange", "zeros", "ones", "full", "empty", "linspace", "eye")
"""Make tensors from numbers: a tracer sees them only if it is told of them."""
LOOKED_INTO = (torch.nn.Sequential, torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)
"""PyTorch's modules that are made of others; the rest are called as they are."""
VALUE = "horovod_train.value"
"""Where a node of the graph keeps what it returned for the example."""
ENTRY = "_horovod_train_entry"
PARTS_HINT = (
    "give the task a method pipeline_parts(model) that returns modules which, called one after the other, "
    "are the model"
)


def trace(model: torch.nn.Module, example: Mapping[str, Any]) -> fx.Graph:
    """Return what a model calls, with an example of its inputs by the names of ``forward``'s parameters.

    It is traced in training and in evaluation, which must differ by nothing but what functions are told
    (``dropout(x, p, self.training)``). The example draws random numbers, and moves running statistics.

    Raises:
        UserError: It decides by what its tensors hold, or cannot be traced for another reason.
    """
    was_training = model.training
    try:
        graphs = [_traced(model.train(mode), example) for mode in (True, False)]
    finally:
        model.train(was_training)
    _join_modes(model, *graphs)
    return graphs[0]


def _traced(model: torch.nn.Module, example: Mapping[str, Any]) -> fx.Graph:
    tracer = _Tracer(list(example.values()))
    try:
        with _makers_seen_by(tracer), _entered(model, list(example)), torch.no_grad():
            return tracer.trace(model)
    except (fx.proxy.TraceError, TypeError, RuntimeError, AttributeError, ValueError, NameError) as error:
        raise UserError(
            f"strategy pipeline: {type(model).__name__} cannot be cut into stages: "
            f"{type(error).__name__}: {error}",
            hint=PARTS_HINT,
        ) from error


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
                asked = training.get_attr("training")
            asked.meta[VALUE] = True
            own.args, own.kwargs = _replaced((own.args, own.kwargs), is_mode, asked)
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
    """Put a leaf in the place of some."""
    each = iter(which)
    return map_aggregate(arguments, lambda old: leaf if next(each) else old)


def same_branch(condition: object, was_taken: bool) -> None:
    """Refuse a batch for which a model's code would branch in another way; graphs call it."""
    if bool(condition) != was_taken:
        raise UserError(
            "strategy pipeline: the model's code branches by the shape of its input, and this batch takes "
            "another branch than the one with which the model was cut into stages",
            hint=PARTS_HINT,
        )


def same_length(sized: Sized, length: int) -> None:
    """Refuse a batch with another number of dimensions; graphs call it."""
    same_branch(len(sized) == length, was_taken=True)


class _Traced(fx.Proxy):
    """A value that has the length of the example."""

    def __len__(self) -> int:
        length = len(self.node.meta[VALUE])
        self.tracer.create_proxy("call_function", same_length, (self, length), {})
        return length

    def __getattr__(self, name: str) -> Any:
        if name == "shape":  # others may be methods, which are called
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)


class _Tracer(fx.Tracer):
    """Computes the example along with the trace."""

    proxy_buffer_attributes = True

    def __init__(self, example: Sequence[Any]) -> None:
        super().__init__()
        self.traced_func_name = ENTRY
        self._example = list(example)
        self.is_computing = False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for a node while the model's code runs."""
        return _Traced(node, self)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is called as it is: PyTorch's own, and one whose activations are recomputed."""
        if "forward" in vars(m):
            return True
        return super().is_leaf_module(m, module_qualified_name) and not isinstance(m, LOOKED_INTO)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        """Make a node, and compute it for the example."""
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        node = proxy.node
        own_args, own_kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get(VALUE))
        was_computing, self.is_computing = self.is_computing, True
        try:
            node.meta[VALUE] = self._computed(kind, target, own_args, own_kwargs)
        finally:
            self.is_computing = was_computing
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
            return self.root.get_submodule(target)(*args, **kwargs)
        return None

    def call_module(self, m: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a module: while the example is computed, as ever."""
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
            return bool(super().to_bool(obj))
        self.create_proxy("call_function", same_branch, (obj, bool(value)), {})
        return bool(value)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Unpack what the example unpacks to."""
        value = obj.node.meta[VALUE]
        if isinstance(value, tuple | list | torch.Size):
            return iter([obj[at] for at in range(len(value))])  # type: ignore[index]
        return iter(super().iter(obj))


@contextmanager
def _entered(model: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Give a model's class a method that takes these inputs alone, while the block runs.

    What else ``forward`` takes keeps its default. A tracer would take a default for an input.
    """
    made: dict[str, Any] = {}
    given = ", ".join(f"{name}={name}" for name in names)
    # The names are those of parameters in Python.
    exec(f"def entry(self, {', '.join(names)}): return self.forward({given})", made)  # noqa: S102
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
