"""PyTorch and Horovod's binding for it, watched while a script uses them."""

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
"""So many parts of a batch are looked at."""


def watch_torch(meter: StepMeter) -> None:
    """Watch batches, backward passes and updates of any script."""
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
                steps.depth = 0  # an update that has raised an error is over
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
    """Notices when an optimizer has updated the weights."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter
        self._main: torch.optim.Optimizer | None = None
        self._norm: float | None = None
        self._seen: set[torch.optim.Optimizer] = set()
        self.depth = 0
        """Horovod's optimizer calls the one it wraps: both are instrumented."""

    def before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An update begins."""
        if not self._meter.is_off:
            with self._meter.watching:
                self._before(optimizer)

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An update has been made."""
        if optimizer is self._main and not self._meter.is_off:
            with self._meter.watching:
                self._after(optimizer)

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        if self._main is None and (self._meter.has_gradients or optimizer in self._seen):
            self._main = optimizer  # the first of several is the one that makes steps
            self._seen.clear()
            self._begin(optimizer)
        if optimizer is not self._main:
            if self._main is None:  # Horovod updates with zeros when it broadcasts an optimizer's state
                self._seen.add(optimizer)
            return
        self.depth += 1
        if self.depth == 2 or not hasattr(optimizer, "synchronize"):  # gradients are those of all ranks now
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
        self._meter.hides_phases = device != "" and not device.startswith("cpu")
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
    """Return a learning rate; None: it is none, or one for each of several things."""
    if isinstance(lr, torch.Tensor):
        return float(lr) if lr.numel() == 1 else None
    return float(lr) if isinstance(lr, int | float) else None


def loss_of(tensors: object) -> float | None:
    """Return a loss, if it is one number on the CPU: elsewhere the host would have to wait for it."""
    if isinstance(tensors, torch.Tensor) and tensors.device.type == "cpu" and tensors.numel() == 1:
        return float(tensors.detach())
    return None


def batch_size(batch: object) -> int | None:
    """Return the samples of a batch; None: that cannot be seen.

    Of rows that are equally long, as of ``tuple(zip(*samples))``, it is their length; else that of the first
    tensor that is found.
    """
    if isinstance(batch, list | tuple) and batch and all(isinstance(row, list | tuple) for row in batch):
        lengths = {len(row) for row in batch}
        if len(lengths) == 1 and any(isinstance(each, torch.Tensor) for each in batch[0][:1]):
            return lengths.pop()
    found: deque[object] = deque([batch])
    for _ in range(MAX_PARTS):  # of lists of numbers there may be millions
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
    """Watch what a script gives to all-reduce, and how long it waits."""
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
