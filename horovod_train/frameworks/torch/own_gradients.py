"""Gradients that a task's loss makes or changes itself, and hooks that it registers too late: refused.

A gradient counts by the rank's part of the samples, and leaves the rank while backward runs. One that is
there when the loss is computed counts as that of the whole batch; a hook that is registered then runs when
the gradient has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from horovod_train.errors import UserError


class GradientWatch:
    """Looks at gradients and hooks before and after the loss of a micro-batch.

    Args:
        model: For the names of parameters.
        sees_hooks_of_tensors: Hooks of a parameter itself are lost, too: the strategy has replaced it.
    """

    def __init__(self, model: torch.nn.Module, *, sees_hooks_of_tensors: bool) -> None:
        self._model = model
        self._sees_hooks_of_tensors = sees_hooks_of_tensors
        self._num_hooks = 0
        self._before: list[tuple[int, int]] = []

    def before_loss(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Remember gradients and hooks of the parameters that may have them."""
        has_none = all(parameter.grad is None for parameter in parameters)  # before the first micro-batch
        self._before = [] if has_none else list(map(_identity, parameters))
        self._num_hooks = self._hooks_of(parameters)

    def after_loss(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Compare.

        Raises:
            UserError: The loss has changed a gradient, or registered a hook.
        """
        if self._before:
            found = zip(parameters, self._before, strict=True)
            changed = next((p for p, before in found if _identity(p) != before), None)
        else:
            changed = next((p for p in parameters if p.grad is not None), None)
        if changed is not None:
            raise UserError(
                f"the task's loss makes or changes the gradient of {self._name_of(changed)!r} itself (a "
                "backward pass of its own, or .grad): it would count as that of the whole batch on each rank",
                hint="return the sum of all terms, or detach what is not to be trained",
            )
        if self._hooks_of(parameters) != self._num_hooks:
            raise UserError(
                "the task's loss registers a hook of a parameter's gradient: it would run after the gradient "
                "has left this rank",
                hint="register it in the task's model()",
            )

    def _hooks_of(self, parameters: Iterable[torch.nn.Parameter]) -> int:
        number = 0
        for parameter in parameters:
            number += len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
            if self._sees_hooks_of_tensors:
                number += len(parameter._backward_hooks or ())  # noqa: SLF001
        return number

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        return next((name for name, each in self._model.named_parameters() if each is parameter), "")


def _identity(parameter: torch.nn.Parameter) -> tuple[int, int]:
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)  # noqa: SLF001
