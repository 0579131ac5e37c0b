"""Periodic checkpoints of the job, and one at the end of training."""

from __future__ import annotations

import math

from horovod_train.checkpoint.arrays import dump_state
from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.frameworks.base import Framework
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.parts import save_checkpoint
from horovod_train.training.run import Run


class SaveCheckpoints(Hook):
    """Saves checkpoints at the job's intervals, after the best evaluation so far, and at the end."""

    def __init__(self, manager: CheckpointManager, framework: Framework) -> None:
        self._manager = manager
        self._framework = framework
        self._passed: list[int] = []
        self._best: float | None = None  # of this start
        self._is_best = False

    @classmethod
    def of(cls, parts: HookParts) -> SaveCheckpoints:
        """Return the hook."""
        assert parts.manager is not None
        assert parts.framework is not None
        return cls(parts.manager, parts.framework)

    def on_start(self, run: Run) -> None:
        """Count intervals from the start of the training."""
        self._passed = self._passed_now(run)

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """Compare the metric of ``checkpoint.best``; after a start, the first evaluation is the best one."""
        rule = run.job.checkpoint.best
        if begins or rule is None:
            return
        value = run.progress.metrics.get(rule.metric, math.nan) * (1 if rule.mode == "max" else -1)
        if math.isfinite(value) and (self._best is None or value > self._best):
            self._best, self._is_best = value, True

    def on_step(self, run: Run) -> None:
        """Save after steps within an epoch, as soon as replicas are identical."""
        if self._is_due(run) and not run.is_epoch_complete and run.replica.replicas_identical:
            self._save(run)

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        """Save after an evaluation at the end of an epoch; ``on_end`` saves after the last one."""
        if self._is_due(run) and not run.is_done:
            self._save(run)

    def _is_due(self, run: Run) -> bool:
        now = self._passed_now(run)
        if any(new < old for new, old in zip(now, self._passed, strict=True)):
            self._passed, self._best = now, None  # a checkpoint was restored
        return self._is_best or now != self._passed

    def _passed_now(self, run: Run) -> list[int]:
        return [run.progress.num_passed(interval) for interval in run.job.checkpoint.every]

    def _save(self, run: Run) -> None:
        self._passed, self._is_best = self._passed_now(run), False
        save(run, self._manager, self._framework)

    def on_end(self, run: Run) -> None:
        """Save the final checkpoint, and wait until it is on disk."""
        save(run, self._manager, self._framework, wait=True)


def save(run: Run, manager: CheckpointManager, framework: Framework, *, wait: bool = False) -> None:
    """Check the results of all steps, and save a checkpoint; with ``wait``, it is on disk at return."""
    run.deliver_all()
    rng = dump_state(*framework.rng_state())
    save_checkpoint(manager, run.world, run.replica, run.progress, rng, wait=wait)
