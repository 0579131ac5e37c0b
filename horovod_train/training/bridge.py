"""What a framework that owns its loop is given instead of ours: the same moments, to call itself."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from horovod_train.checkpoint.holders import keyed
from horovod_train.data.planned_step import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.base import Reading
from horovod_train.health.desync import digest
from horovod_train.training import loop
from horovod_train.training.actions import Action, ExitPreempted, RestoreCheckpoint, Stop
from horovod_train.training.run import Run

log = logging.getLogger(__name__)


@dataclass
class LoopBridge:
    """One run, as a foreign loop sees it. Its methods are the moments of ``loop.train``."""

    run: Run
    _evaluated: bool = False
    _last_weights: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to train."""
        return self.run.is_done

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.run.progress.epoch

    @property
    def is_epoch_complete(self) -> bool:
        """Whether every sample of the current epoch was used."""
        return self.run.is_epoch_complete

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.run.policy.at(self.run.progress.epochs_passed)

    @property
    def wants_norm(self) -> bool:
        """Whether the next step is to take the gradient norm."""
        return self.run.wants_norm

    @property
    def evaluates_next(self) -> bool:
        """Whether the epoch under way ends with an evaluation."""
        return loop.evaluates_next(self.run)

    def begin(self) -> None:
        """Training begins."""
        loop.begin(self.run)

    def rest_of_epoch(self) -> list[PlannedStep]:
        """Return the steps that are left in the current epoch, up to the job's limit."""
        return loop.rest_of_epoch(self.run)

    def after_step(self, step: PlannedStep, reading: Reading, lr: float) -> None:
        """An optimizer step was made.

        Raises:
            PreemptedError: This process is to leave; everything is saved.
            UserError: A hook answers what this loop cannot do.
        """
        self._follow(loop.after_step(self.run, step, reading, lr))

    def finish_epoch(self) -> dict[str, float]:
        """All steps of an epoch were made; return the evaluation, empty when none was due."""
        self._evaluated = loop.finish_epoch(self.run)
        return self.run.progress.current_metrics

    def after_epoch(self) -> None:
        """The epoch was finished, and callbacks of its end were called: save it where that is due.

        Raises:
            As ``after_step``.
        """
        self._follow(loop.after_epoch(self.run, evaluated=self._evaluated))

    def before_last_callbacks(self) -> None:
        """The last step was made; callbacks of the end of training follow, and may change weights."""
        self._last_weights = self._weights()

    def _follow(self, action: Action | None) -> None:
        match action:
            case ExitPreempted():
                raise loop.preempted_error(action)
            case RestoreCheckpoint() | Stop():
                raise UserError(
                    f"training is to {'stop' if isinstance(action, Stop) else 'go back'} at step "
                    f"{action.step} ({action.why}), which {self.run.job.framework}'s own loop cannot",
                    hint="use framework: torch",
                )

    def end(self) -> None:
        """Training is complete; weights that the last callbacks have changed are evaluated again."""
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
