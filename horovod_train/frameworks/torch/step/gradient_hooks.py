"""Hooks that a user has registered for gradients of parameters, called with the gradient of the step.

In one process, such a hook receives the gradient of the joint batch. Under data parallelism, autograd would
call it with this rank's part of each micro-batch: a hook that is not linear, such as ``clamp``, would train
other weights. Therefore, autograd calls a hook without effect, and the replica calls it once in each step,
when the gradient is complete: summed over micro-batches and ranks, and divided by the count of a loss that
is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from types import FunctionType
from typing import Any

import torch

Hooks = MutableMapping[int, Callable[..., Any]]


class _Deferred:
    """A hook without effect; ``GradientHooks`` calls the user's hook later."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, _: object) -> None:
        """Do nothing."""


def defer_hooks_after_accumulation(model: torch.nn.Module) -> None:
    """Defer the hooks of ``register_post_accumulate_grad_hook`` that a model's parameters have now.

    Must be called before a strategy registers hooks of this kind, which are not deferred.
    """
    for parameter in model.parameters():
        _defer(_after_accumulation(parameter))


class GradientHooks:
    """The hooks of gradients of parameters. A user's handle of a hook still removes it.

    ``parameters`` returns the parameters that may have gradients.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = parameters

    def defer(self) -> None:
        """Make autograd call hooks without effect, also those that were registered since the last call.

        Must be called before the first backward pass of each step.
        """
        for parameter in self._parameters():
            _defer(_of_tensor(parameter))

    @torch.no_grad()
    def call(self) -> None:
        """Call all hooks with the complete gradients of the step, in PyTorch's order.

        Strategies keep gradients in shared memory: a result is copied into the gradient.
        """
        for parameter in self._parameters():
            found = hooks_of(parameter)
            if not any(found):  # called in each step: most parameters have no hooks
                continue
            hooks, later = map(_deferred, found)
            if (gradient := parameter.grad) is None or not (hooks or later):
                continue
            for hook in hooks:
                if (result := hook(gradient)) is not None:
                    gradient.copy_(result)
            for hook in later:
                hook(parameter)
            if parameter.grad is None:
                gradient.zero_()
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
                parameter.grad = gradient


def num_hooks(parameter: torch.Tensor) -> int:
    """Return the number of hooks of a parameter's gradient."""
    return len(_of_tensor(parameter)) + len(_after_accumulation(parameter))


def hooks_of(parameter: torch.Tensor) -> tuple[Hooks, Hooks]:
    """Return the hooks of a parameter's gradient, before and after accumulation, as PyTorch stores them."""
    return _of_tensor(parameter), _after_accumulation(parameter)


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a user has registered a hook of a parameter's gradient that can be deferred."""
    hooks = (*_of_tensor(parameter).values(), *_after_accumulation(parameter).values())
    return any(_is_of_user(hook) or isinstance(hook, _Deferred) for hook in hooks)


def _defer(hooks: Hooks) -> None:
    for number, hook in hooks.items():
        if _is_of_user(hook):
            hooks[number] = _Deferred(hook)


def _is_of_user(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is the user's; those of ``register_multi_grad_hook`` must run within backward."""
    is_of_torch = isinstance(hook, FunctionType) and hook.__module__.partition(".")[0] == "torch"
    return not (is_of_torch or isinstance(hook, _Deferred))


def _of_tensor(parameter: torch.Tensor) -> Hooks:
    hooks: Hooks | None = parameter._backward_hooks  # noqa: SLF001  (no public API)
    return hooks or {}


def _after_accumulation(parameter: torch.Tensor) -> Hooks:
    hooks: Hooks | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return hooks or {}


def _deferred(hooks: Hooks) -> list[Callable[..., Any]]:
    """Return the user's hooks; a hook may remove itself while it is called."""
    return [each.hook for each in list(hooks.values()) if isinstance(each, _Deferred)]
