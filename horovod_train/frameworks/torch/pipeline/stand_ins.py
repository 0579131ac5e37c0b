"""What a task is given in the model's place, where the model is spread over ranks.

A task computes its loss by calling the model, once. The rank with the first stage has to know with what; the
one with the last stage has what it returns. So the first calls the task with a model that notes its inputs
and goes no further, and the last with one that returns what the pipeline has computed.

What a task draws at random before it calls the model (a mask of tokens, say) must be the same on both: they
draw with the same seed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.reader import own_seeds

Function = Callable[[Any, Any], Any]
"""A task's ``loss`` or ``metrics``: takes a model and a batch."""


class _Asked(BaseException):  # no Exception: a task may catch those
    """The model was called."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


class _StandIn:
    """Has all that a model has, but for its call."""

    def __init__(self, model: torch.nn.Module, call: Callable[..., Any]) -> None:
        self._model = model
        self._call = call
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def asked_for(function: Function, model: torch.nn.Module, batch: Any, seed: int) -> dict[str, Any]:
    """Return what a function of the task calls the model with, by the names of ``forward``'s parameters.

    Raises:
        UserError: It does not call it, or the model takes any number of inputs.
    """
    signature = inspect.signature(model.forward)

    def call(*args: Any, **kwargs: Any) -> Any:
        raise _Asked(dict(signature.bind(*args, **kwargs).arguments))

    try:
        with seeded(seed):
            function(_StandIn(model, call), batch)
    except _Asked as asked:
        many = [name for name in asked.inputs if signature.parameters[name].kind.name.startswith("VAR_")]
        if many:
            raise UserError(
                f"strategy pipeline: {type(model).__name__}.forward takes *{many[0]}",
                hint="give each input of the model a name",
            ) from None
        return asked.inputs
    raise UserError(
        "strategy pipeline: the task computes without calling the model",
        hint="call the model itself, once: model(inputs); not one of its methods or parts",
    )


def answered_with(function: Function, model: torch.nn.Module, batch: Any, output: Any, seed: int) -> Any:
    """Return what a function of the task makes of a model's output.

    Raises:
        UserError: It calls the model more than once.
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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let all generators of this rank start from a seed, and go on as before afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices), own_seeds(seed):
        torch.manual_seed(seed)
        yield
