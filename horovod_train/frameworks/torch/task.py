"""The interface of a user's task for PyTorch.

class MyTask:
    def model(self): ...                   a torch.nn.Module
    def train_data(self): ...              a dataset with __len__ and __getitem__
    def loss(self, model, batch): ...      mean loss over the samples of a batch, or a sum and a count

    def eval_data(self): ...               optional: data for evaluation
    def metrics(self, model, batch): ...   optional: {name: one value per sample}
    def param_groups(self, model): ...     optional: optimizer groups, each may have an lr_scale
    def after_update(self, model): ...     optional: changes weights after each update
    def pipeline_parts(self, model): ...   optional: modules that form the model, for pipeline parallelism
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.task import check_is_one_number

REQUIRED = ("model", "train_data", "loss")
OPTIONAL = ("eval_data", "metrics", "param_groups", "after_update", "pipeline_parts")


class TorchTask(Protocol):
    """The required methods of a task."""

    def model(self) -> torch.nn.Module:
        """Return a new model, on the CPU."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss over a batch, shape []; a tuple of a sum and a count is also supported."""
        ...


def is_sum_and_count(value: object) -> bool:
    """Return whether a loss or metric is a sum and its divisor, such as a number of tokens."""
    return isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "_fields")


def check_count(count: object) -> None:
    """Check the count of a loss that is a sum and a count.

    Raises:
        UserError: The count is not a number, or depends on weights.
    """
    is_number = isinstance(count, bool | int | float) or getattr(count, "shape", None) in ((), (1,))
    if not is_number:
        raise UserError(
            f"the task's loss is a tuple of a loss and a {type(count).__name__}",
            hint="return the mean loss alone, or the sum of losses and the number to divide it by",
        )
    if getattr(count, "requires_grad", False):
        raise UserError(
            "the task's loss is a sum and a count, and the count depends on weights: gradients would not be "
            "those of the quotient",
            hint="detach the count, or return the mean",
        )


def as_numbers(value: Any) -> Any:
    """Return a metric's value as an array on the CPU, or a sum and a count as two numbers."""
    if is_sum_and_count(value):
        return tuple(float(torch.as_tensor(each)) for each in value)
    return torch.as_tensor(value).double().cpu().numpy()


def checked_loss(loss: object) -> torch.Tensor:
    """Return a loss, shape [], if its gradient can be computed.

    Raises:
        UserError: The loss is not a tensor, has several elements, is complex, is detached, or is split over
            ranks.
    """
    if not isinstance(loss, torch.Tensor):
        raise UserError(
            f"the task's loss is a {type(loss).__name__}, not a tensor",
            hint="return the mean loss over the batch, without .item() or float()",
        )
    check_is_one_number(loss.shape)
    if hasattr(loss, "device_mesh"):  # a DTensor
        raise UserError(
            "the task's loss uses weights outside of the model's forward pass, and a rank has only a part of "
            "them",
            hint="let the model's forward return what depends on weights (a penalty, for example), use the "
            "optimizer's weight_decay, or strategy: allreduce or zero",
        )
    if loss.is_complex():
        raise UserError("the task's loss is a complex number", hint="return a real one, such as loss.abs()")
    if not loss.requires_grad:
        raise UserError(
            "the task's loss does not depend on anything that is trained",
            hint="was it detached (detach(), item(), torch.no_grad()), or are all the layers that it uses "
            "frozen?",
        )
    return loss.reshape(())
