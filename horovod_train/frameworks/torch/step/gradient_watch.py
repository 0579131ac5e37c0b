"""Refusal of a task's loss that changes gradients itself, or registers hooks of gradients.

Gradients are weighted by the rank's part of the samples, and are sent during the backward pass. A gradient
that the loss creates would count as that of the whole batch, and a hook that the loss registers would run
after the gradient is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_

import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.step.gradient_hooks import num_hooks
from horovod_train.frameworks.torch.strategies.base import Strategy

Gradients = list[torch.Tensor | None]


class GradientWatch:
    """Comparison of gradients and hooks before and after the loss of a micro-batch.

    ``parameters`` returns the parameters that may have gradients. ``strategy`` refuses a backward pass while
    the loss is computed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        strategy: Strategy,
        parameters: Callable[[], Sequence[torch.nn.Parameter]],
    ) -> None:
        self._model, self._strategy, self._parameters = model, strategy, parameters
        self._num_hooks = 0
        self._gradients: Gradients = []
        self._versions: list[int] = []

    def watched(self, share: float) -> AbstractContextManager[None]:
        """Return the context of the task's loss, for a micro-batch with a fraction of the step's samples.

        Without other micro-batches and ranks, the loss may change gradients.
        """
        return self._watched() if share < 1 else nullcontext()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Compare gradients and hooks before and after the block, which computes the task's loss.

        Raises:
            UserError: The loss has changed a gradient, or registered a hook.
        """
        parameters = self._parameters()
        self._gradients = [parameter.grad for parameter in parameters]
        self._versions = _versions(self._gradients)
        self._num_hooks = self._hooks_of(parameters)
        self._strategy.is_in_loss = True
        try:
            yield
        finally:
            self._strategy.is_in_loss = False
        changed = self._changed(parameters)
        if changed is not None:
            raise UserError(
                f"the task's loss creates or changes the gradient of {self._name_of(changed)!r} itself (by "
                "``backward()`` or .grad): it would not be weighted by the rank's part of the batch",
                hint="return the sum of all terms, or detach what is not to be trained",
            )
        if self._hooks_of(parameters) != self._num_hooks:
            raise UserError(
                "the task's loss registers a hook of a parameter's gradient: it would run after the gradient "
                "was sent",
                hint="register it in the task's model()",
            )

    def _changed(self, parameters: Sequence[torch.nn.Parameter]) -> torch.nn.Parameter | None:
        """Return a parameter whose gradient was replaced or written; discard the recorded gradients."""
        before, self._gradients = self._gradients, []
        now = [parameter.grad for parameter in parameters]
        versions = _versions(now)
        # Called in each micro-batch: comparing whole lists takes half the time of a loop over parameters.
        if all(map(is_, before, now)) and versions == self._versions:
            return None
        same = (a is b and v == w for a, b, v, w in zip(before, now, self._versions, versions, strict=True))
        return next(parameter for parameter, is_same in zip(parameters, same, strict=True) if not is_same)

    def _hooks_of(self, parameters: Iterable[torch.nn.Parameter]) -> int:
        return sum(map(num_hooks, parameters))

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        return next((name for name, each in self._model.named_parameters() if each is parameter), "")


def _versions(gradients: Gradients) -> list[int]:
    """Return the version counter of each gradient; 0: there is none."""
    return [0 if gradient is None else gradient._version for gradient in gradients]  # noqa: SLF001
