"""Interface of a run for a framework with its own training loop, which calls the stages of ``loop.py``."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from horovod_train.checkpoint.holders import keyed
from horovod_train.data.planned_step import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.base import PendingOutcome
from horovod_train.health.desync import digest
from horovod_train.training import loop
from horovod_train.training.actions import Action, ExitPreempted, RestoreCheckpoint, Stop
from horovod_train.training.run import Run

log = logging.getLogger(__name__)


@dataclass
class LoopBridge:
    """A run, for a framework's own loop. The methods correspond to the stages of ``loop.train``."""

    run: Run
    _evaluated: bool = False
    _last_weights: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether training is complete or stopped."""
        return self.run.is_done

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.run.progress.epoch

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole job, the last of which may be incomplete."""
        return self.run.num_epochs

    @property
    def is_epoch_complete(self) -> bool:
        """Whether every sample of the current epoch was used."""
        return self.run.is_epoch_complete

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.run.lr_of(self.run.global_batch_size)

    @property
    def wants_norm(self) -> bool:
        """Whether the next step computes the gradient norm."""
        return self.run.wants_norm

    @property
    def evaluates_now(self) -> bool:
        """Whether an evaluation follows the last step of an epoch, which was performed."""
        return loop.evaluates_now(self.run)

    def begin(self) -> None:
        """Start training."""
        loop.begin(self.run)

    def rest_of_epoch(self) -> list[PlannedStep]:
        """Return the remaining steps of the current epoch, limited by the length of the job."""
        return loop.rest_of_epoch(self.run)

    def after_step(self, step: PlannedStep, pending: PendingOutcome, lr: float) -> None:
        """Record an optimizer step, and perform the action of hooks.

        Raises:
            PreemptedError: The job was preempted; a checkpoint is saved.
            UserError: A hook requests an action that the framework's own loop does not support.
        """
        self._follow(loop.after_step(self.run, step, pending, lr))

    def finish_epoch(self) -> dict[str, float]:
        """Complete an epoch after its last step; return the evaluation, empty if none was due."""
        self._evaluated = loop.finish_epoch(self.run)
        return self.run.progress.current_metrics

    def after_epoch(self) -> None:
        """Save a checkpoint, if due. Call it after end-of-epoch callbacks; raises as ``after_step``."""
        self._follow(loop.after_epoch(self.run, evaluated=self._evaluated))

    def report_incomplete_epoch(self) -> None:
        """Log that the job ends, because the framework has left an epoch early."""
        run = self.run
        if run.world.rank == 0 and not run.is_done:
            log.warning(
                "training ends in epoch %d after %d of %d samples: a hook or callback has ended the epoch, "
                "and a job reads each of its samples",
                run.progress.epoch + 1,
                run.progress.cursor,
                run.progress.order.num_samples,
            )

    def before_on_train_end(self) -> None:
        """Store a digest of the weights before end-of-training callbacks, which may change them."""
        self._last_weights = self._weights()

    def _follow(self, action: Action | None) -> None:
        match action:
            case ExitPreempted():
                raise loop.preempted_error(action)
            case RestoreCheckpoint() | Stop():
                raise UserError(
                    f"a hook requests to "
                    f"{'stop' if isinstance(action, Stop) else 'restore a checkpoint'} at step "
                    f"{action.step} ({action.why}), which {self.run.job.framework}'s loop does not support",
                    hint="use framework: torch",
                )

    def end(self) -> None:
        """End training; evaluate again if end-of-training callbacks have changed the weights."""
        if self._last_weights is not None and self._weights() != self._last_weights:
            self.run.progress.metrics_step = -1
            if self.run.world.rank == 0:
                log.warning(
                    "callbacks have changed the weights at the end of training: the last checkpoint has the "
                    "changed weights and their metrics, with the optimizer state of the last step"
                )
        loop.end(self.run)

    def _weights(self) -> str:
        return digest(keyed(replace(self.run.replica.state(copy=False), optimizer={})))
