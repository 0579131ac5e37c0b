"""Checkpoints when the job says so, and at the end."""

from __future__ import annotations

from horovod_train.checkpoint.arrays import dump_state
from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.frameworks.base import Framework
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.parts import save_checkpoint
from horovod_train.training.run import Run


class SaveCheckpoints(Hook):
    """Saves when the job says so, and at the end."""

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
        """Save when steps say so, as soon as rank 0's replica is everyone's."""
        every = run.job.checkpoint.every_steps
        self._is_due = self._is_due or bool(every and run.progress.step % every == 0)
        if self._is_due and run.replica.replicas_identical:
            self._is_due = False
            save(run, self._manager, self._framework)

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        """Save when epochs say so."""
        every = run.job.checkpoint.every_epochs
        if every and run.progress.epoch % every == 0 and not run.is_done:
            save(run, self._manager, self._framework)

    def on_end(self, run: Run) -> None:
        """Save the result."""
        save(run, self._manager, self._framework, wait=True)


def save(run: Run, manager: CheckpointManager, framework: Framework, *, wait: bool = False) -> None:
    """Save now; with ``wait`` it is on disk afterwards. All steps have turned out to be usable."""
    run.deliver_all()
    rng = dump_state(*framework.rng_state())
    save_checkpoint(manager, run.world, run.replica, run.progress, rng, wait=wait)
