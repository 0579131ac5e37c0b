"""Comparisons of the gradient of all ranks with that of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from horovod_train.data.shard import StepShare, epoch_order, split_evenly
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.run import Run

MAX_INTERVAL_STEPS = 1000
"""Largest number of steps between two comparisons."""


class GradientComparison(Protocol):
    """Compares gradients (``torch/verify/one_process.py``)."""

    def compare(self, step: int, parts: Sequence[Sequence[int]]) -> None:
        """Compare on samples of two ranks in a step; raises ``UserError`` for a refused difference."""


@runtime_checkable
class ComparesGradients(Protocol):
    """A replica whose gradients may be compared with those of one process."""

    one_process: GradientComparison | None


class CompareWithOneProcess(Hook):
    """Compares after steps 1, 2, 4, 8, ..., and then after every 1,000 steps."""

    def __init__(self) -> None:
        self._num_steps, self._next = 0, 1
        self._share: StepShare | None = None

    @classmethod
    def of(cls, parts: HookParts) -> CompareWithOneProcess | None:
        """Return the hook, unless the job disables it or has one rank."""
        return cls() if parts.job.health.one_process != "off" and parts.world.size > 1 else None

    def on_reading(self, run: Run, report: StepReport) -> None:
        """Record which samples a step had; on a device, it is not the last one."""
        self._share = report.share

    def on_step(self, run: Run) -> None:
        """Compare, if it is due and the replica supports it."""
        self._num_steps += 1
        replica = run.replica
        if not isinstance(replica, ComparesGradients) or replica.one_process is None or self._share is None:
            return
        if self._num_steps >= self._next:
            self._next = self._num_steps + min(self._num_steps, MAX_INTERVAL_STEPS)
            replica.one_process.compare(run.progress.step, _samples(run, self._share))


def _samples(run: Run, share: StepShare) -> list[list[int]]:
    """Return the first samples of rank 0 and of another rank in a step."""
    order = run.progress.order
    places = epoch_order(order.num_samples, order.seed, run.progress.epoch, shuffle=order.shuffle)
    of_step = places[share.cursor : share.cursor + share.num_samples]
    start, stop = split_evenly(len(of_step), 1, min(run.mesh.data.size, len(of_step)) or 1)
    return [of_step[:start].tolist(), of_step[start:stop].tolist()]
