"""Stand-ins for a model that is split into stages, which are passed to the task instead of the model.

A task computes its loss by calling the model once. The rank with the first stage needs the inputs of this
call, and calls the task with a stand-in that records them and aborts the task. The rank with the last stage
calls the task with a stand-in that returns the output of the pipeline.

Random numbers that a task draws before it calls the model, such as a mask of tokens, must be equal on both
ranks. Both therefore use the same seed.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.randomness import mix
from horovod_train.frameworks.reader import seeded_generators

Function = Callable[[Any, Any], Any]
"""A task's ``loss`` or ``metrics``, which receives a model and a batch."""


class _ModelCalled(BaseException):  # not an Exception, because a task may catch those
    """Signal that the task has called the model."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


class _StandIn:
    """Proxy of a model with read-only attributes, whose call is replaced."""

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
