"""Instrumentation of PyTorch and its Horovod binding for scripts."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from time import monotonic, perf_counter
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from horovod_train.scripts.meter import StepMeter, replace_everywhere

MAX_PARTS = 64
"""Maximum number of parts of a batch that are inspected."""


def watch_torch(meter: StepMeter) -> None:
    """Instrument reading of batches, backward passes and optimizer updates."""
    steps = _Steps(meter)
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)
    plain_backward: Callable[..., None] = torch.autograd.backward
    plain_next = _BaseDataLoaderIter.__next__
    depth = 0  # checkpointing calls backward within backward

    @wraps(plain_backward)
    def backward(tensors: object, *args: object, **kwargs: object) -> None:  # Tensor.backward calls it, too
        nonlocal depth
        begun_s = perf_counter()
        depth += 1
        try:
            plain_backward(tensors, *args, **kwargs)
        finally:
            depth -= 1
        if not depth and not meter.is_off:
            with meter.watching:
                steps.depth = 0  # an update that raised an exception has not reset it
                meter.backward(begun_s, loss_of(tensors) if meter.wants_loss else None)

    @wraps(plain_next)
    def next_batch(self: _BaseDataLoaderIter) -> object:
        begun_s = perf_counter()
        try:
            found = plain_next(self)
        except StopIteration:
            with meter.watching:
                meter.exclude(begun_s)
            raise
        if not meter.is_off:
            with meter.watching:
                if torch.is_grad_enabled():
                    meter.batch(begun_s, batch_size(found), self)
                else:
                    meter.exclude(begun_s)
        return found

    torch.autograd.backward = backward
    _BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign]


class _Steps:
    """Detection of optimizer steps."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter
        self._main: torch.optim.Optimizer | None = None
        self._norm: float | None = None
        self._seen: set[torch.optim.Optimizer] = set()
        self.depth = 0
        """Nesting depth of updates: Horovod's optimizer calls the wrapped one, and both are instrumented."""

    def before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Handle the start of an update."""
        if not self._meter.is_off:
            with self._meter.watching:
                self._before(optimizer)

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Handle the end of an update."""
        if optimizer is self._main and not self._meter.is_off:
            with self._meter.watching:
                self._after(optimizer)

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        if self._main is None and (self._meter.has_gradients or optimizer in self._seen):
            self._main = optimizer  # updates of the first optimizer are steps
            self._seen.clear()
            self._begin(optimizer)
        if optimizer is not self._main:
            if self._main is None:  # Horovod updates with zeros when it broadcasts an optimizer's state
                self._seen.add(optimizer)
            return
        self.depth += 1
        if self.depth == 2 or not hasattr(optimizer, "synchronize"):  # gradients are reduced now
            self._norm = self._take_norm(optimizer) if self._meter.wants_norm else None

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        self.depth = max(0, self.depth - 1)
        if not self.depth:
            lr = optimizer.param_groups[0].get("lr")
            self._meter.step(as_number(lr), self._norm)
            self._norm = None

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = list(_parameters(optimizer))
        device = str(parameters[0].device) if parameters else ""
        self._meter.is_asynchronous = device != "" and not device.startswith("cpu")
        horovod = sys.modules.get("horovod.torch")
        size = horovod.size() if horovod is not None and horovod.is_initialized() else 1
        self._meter.begin_training(sum(each.numel() for each in parameters), size, device)

    @staticmethod
    def _take_norm(optimizer: torch.optim.Optimizer) -> float | None:
        gradients = [each.grad for each in _parameters(optimizer) if each.grad is not None]
        if not gradients or any(each.is_sparse for each in gradients):
            return None
        return float(get_total_norm(gradients))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def as_number(lr: object) -> float | None:
    """Return a learning rate as a float; None: it is not a single number."""
    if isinstance(lr, torch.Tensor):
        return float(lr) if lr.numel() == 1 else None
    return float(lr) if isinstance(lr, int | float) else None


def loss_of(tensors: object) -> float | None:
    """Return a loss that is one number on the CPU; None for others: reading from a GPU blocks the host."""
    if isinstance(tensors, torch.Tensor) and tensors.device.type == "cpu" and tensors.numel() == 1:
        return float(tensors.detach())
    return None


def batch_size(batch: object) -> int | None:
    """Return the number of samples of a batch; None: unknown.

    It is the length of the batch's rows if these are equally long (``tuple(zip(*samples))``), and otherwise
    the length of the first tensor.
    """
    if isinstance(batch, list | tuple) and batch and all(isinstance(row, list | tuple) for row in batch):
        lengths = {len(row) for row in batch}
        if len(lengths) == 1 and any(isinstance(each, torch.Tensor) for each in batch[0][:1]):
            return lengths.pop()
    found: deque[object] = deque([batch])
    for _ in range(MAX_PARTS):  # a batch may contain lists of millions of numbers
        if not found:
            return None
        part = found.popleft()
        if isinstance(part, torch.Tensor):
            return len(part) if part.dim() else None
        if isinstance(part, dict):
            found.extend(islice(part.values(), MAX_PARTS))
        elif isinstance(part, list | tuple):
            found.extend(part[:MAX_PARTS])
    return None


def watch_horovod_torch(meter: StepMeter) -> None:
    """Instrument collectives: the size of their inputs, and the waiting time."""
    operations = sys.modules["horovod.torch.mpi_ops"]
    plain = operations.synchronize
    replace_everywhere("horovod.torch", "synchronize", plain, _timed(plain, meter))
    for name in ("_allreduce_async", "_reducescatter_async"):
        setattr(operations, name, _counted(getattr(operations, name), meter, lambda tensor: [tensor]))
    for name in ("_grouped_allreduce_async", "_grouped_reducescatter_async"):
        setattr(operations, name, _counted(getattr(operations, name), meter, lambda tensors: tensors))


def _timed(plain: Callable[..., object], meter: StepMeter) -> Callable[..., object]:
    @wraps(plain)
    def timed(*args: object, **kwargs: object) -> object:
        begun_s, meter.waiting_since_s = perf_counter(), monotonic()
        try:
            return plain(*args, **kwargs)
        finally:
            meter.waiting_since_s = None
            if not meter.is_off:
                with meter.watching:
                    meter.add_wait_s(perf_counter() - begun_s)

    return timed


def _counted(
    plain: Callable[..., object], meter: StepMeter, tensors_of: Callable[[Any], list[torch.Tensor]]
) -> Callable[..., object]:
    @wraps(plain)
    def counted(tensor: object, *args: object, **kwargs: object) -> object:
        if not meter.is_off:
            with meter.watching:
                meter.sent(sum(each.numel() * each.element_size() for each in tensors_of(tensor)))
        return plain(tensor, *args, **kwargs)

    return counted
