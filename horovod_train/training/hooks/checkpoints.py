"""Periodic checkpoints of the job, and one at the end of training."""

from __future__ import annotations

from horovod_train.checkpoint.arrays import dump_state
from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.frameworks.base import Framework
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.parts import save_checkpoint
from horovod_train.training.run import Run


class SaveCheckpoints(Hook):
    """Saves checkpoints at the job's intervals, and at the end of training."""

    def __init__(self, manager: CheckpointManager, framework: Framework) -> None:
        self._manager = manager
        self._framework = framework
        self._is_due = False

    @classmethod
    def of(cls, parts: HookParts) -> SaveCheckpoints:
        """Return the hook."""
        assert parts.manager is not None
        assert parts.framework is not None
        return cls(parts.manager, parts.framework)

    def on_step(self, run: Run) -> None:
        """Save every ``checkpoint.every_steps`` steps, as soon as replicas are identical."""
        every = run.job.checkpoint.every_steps
        self._is_due = self._is_due or bool(every and run.progress.step % every == 0)
        if self._is_due and run.replica.replicas_identical:
            self._is_due = False
            save(run, self._manager, self._framework)

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        """Save every ``checkpoint.every_epochs`` epochs; ``on_end`` saves after the last one."""
        every = run.job.checkpoint.every_epochs
        if every and run.progress.epoch % every == 0 and not run.is_done:
            save(run, self._manager, self._framework)

    def on_end(self, run: Run) -> None:
        """Save the final checkpoint, and wait until it is on disk."""
        save(run, self._manager, self._framework, wait=True)


def save(run: Run, manager: CheckpointManager, framework: Framework, *, wait: bool = False) -> None:
    """Check the results of all steps, and save a checkpoint; with ``wait``, it is on disk at return."""
    run.deliver_all()
    rng = dump_state(*framework.rng_state())
    save_checkpoint(manager, run.world, run.replica, run.progress, rng, wait=wait)
