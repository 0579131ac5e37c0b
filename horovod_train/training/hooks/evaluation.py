"""Evaluations within an epoch; the loop evaluates at the end of an epoch."""

from __future__ import annotations

from horovod_train.training import loop
from horovod_train.training.hooks.base import Hook
from horovod_train.training.run import Run


class EvaluateWithinEpoch(Hook):
    """Evaluates when ``evaluation.every`` has passed, as soon as replicas are identical."""

    def on_step(self, run: Run) -> None:
        """Evaluate, and apply early stopping and the plateau of the learning rate."""
        if run.is_evaluation_due and not run.is_epoch_complete and run.replica.replicas_identical:
            run.deliver_all()
            loop.evaluate_and_follow(run)
