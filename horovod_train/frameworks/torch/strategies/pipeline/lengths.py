"""Lengths and numbers of inputs in traced code: traced if possible, otherwise required to be constant."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from horovod_train.errors import UserError

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
