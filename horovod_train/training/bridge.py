"""What a framework that owns its loop is given instead of ours: the same moments, to call itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from horovod_train.data.shard import StepShare
from horovod_train.frameworks.base import StepOutcome
from horovod_train.training import loop
from horovod_train.training.run import Run


@dataclass(frozen=True)
class LoopBridge:
    """One run, as a foreign loop sees it. Its methods are the moments of ``loop.train``."""

    run: Run

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
    def num_steps_left(self) -> int | None:
        """Steps until ``train.max_steps``; None: no limit."""
        limit = self.run.job.train.max_steps
        return None if limit is None else max(0, limit - self.run.progress.step)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.run.policy.at(self.run.progress.epochs_passed)

    @property
    def wants_norm(self) -> bool:
        """Whether the next step is to take the gradient norm."""
        return loop.wants_norm(self.run)

    @property
    def evaluates_next(self) -> bool:
        """Whether the epoch under way ends with an evaluation."""
        return loop.evaluates_next(self.run)

    def begin(self) -> None:
        """Training begins."""
        loop.begin(self.run)

    def rest_of_epoch(self) -> tuple[list[StepShare], Iterator[Any]]:
        """Return this rank's shares of the steps that the current epoch still has, and their batches."""
        return loop.rest_of_epoch(self.run)

    def after_step(self, share: StepShare, outcome: StepOutcome, lr: float) -> None:
        """An optimizer step was made."""
        loop.after_step(self.run, share, outcome, lr)

    def after_epoch(self) -> dict[str, float]:
        """All steps of an epoch were made; return the evaluation, empty when none was due."""
        loop.after_epoch(self.run)
        return self.run.progress.current_metrics

    def end(self) -> None:
        """Training is complete."""
        loop.end(self.run)
