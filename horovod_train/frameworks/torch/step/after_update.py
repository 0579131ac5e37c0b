"""A task's ``after_update(model)``, which changes weights after each update, identically on all ranks."""

from __future__ import annotations

import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.step.update import may_be_used
from horovod_train.frameworks.torch.strategies.base import Strategy
from horovod_train.frameworks.torch.task import TorchTask


class TaskAfterUpdate:
    """Caller of a task's ``after_update`` method, if it exists; ``task`` is None in a user's own loop.

    Raises:
        UserError: The task has the method, and ranks do not store each weight under this strategy.
    """

    def __init__(self, task: TorchTask | None, model: torch.nn.Module, strategy: Strategy) -> None:
        self._call = getattr(task, "after_update", None)
        self._model, self._strategy = model, strategy
        if self.exists and not strategy.capabilities.after_update:
            raise UserError(
                "the task has after_update(model), and under this strategy the model of a rank does not hold "
                "each weight",
                hint="choose strategy allreduce, zero, ddp or fsdp, or leave after_update out",
            )

    @property
    def exists(self) -> bool:
        """Whether the task has the method."""
        return self._call is not None

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Call the method, unless the step was skipped."""
        if self._call is not None and may_be_used(is_used):
            with self._strategy.whole_weights():
                self._call(self._model)
