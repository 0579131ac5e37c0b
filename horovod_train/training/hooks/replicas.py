"""Check that replicas are identical on all ranks; a difference ends training."""

from __future__ import annotations

from horovod_train.health.desync import check_replicas_identical
from horovod_train.training.hooks.base import Hook
from horovod_train.training.run import Run


class CheckReplicasIdentical(Hook):
    """Compares the state of all ranks before the first step, at the end, and periodically."""

    def __init__(self) -> None:
        self._is_due = False

    def on_start(self, run: Run) -> None:
        """Compare before the first step."""
        self._check(run, "before the first step")

    def on_step(self, run: Run) -> None:
        """Compare every ``health.sync_check_every_steps`` steps, as soon as replicas must be identical."""
        every = run.job.health.sync_check_every_steps
        self._is_due = self._is_due or bool(every and run.progress.step % every == 0)
        if self._is_due and run.replica.replicas_identical:
            self._is_due = False
            self._check(run, f"after step {run.progress.step}")

    def on_end(self, run: Run) -> None:
        """Compare the final state before it is saved."""
        self._check(run, "at the end")

    def _check(self, run: Run, when: str) -> None:
        if run.world.size > 1:
            run.replica.sync_buffers()
            check_replicas_identical(run.world, run.replica.state(copy=False), when)
