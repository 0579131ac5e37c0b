"""Spikes of the loss: ``health.loss_spike``.

A loss is a spike if it is far above the last ones: (loss - median) / (1.4826 x median of the absolute
deviations) is above a threshold. 1.4826 makes the denominator the standard deviation of normal numbers.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import broadcast_json
from horovod_train.config.schema import LossSpikes
from horovod_train.errors import NumericError
from horovod_train.events.types import LossSpike
from horovod_train.events.wire import Reporter
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.run import RestoreCheckpoint, Run, StepReport

NORMAL = 1.4826
MIN_DEVIATION = 1e-3
"""Smallest deviation, relative to the median: a loss that hardly changes has no spikes."""


@dataclass
class WatchLoss(Hook):
    """Reports spikes of the loss, and goes back to a checkpoint before them if the job wants it."""

    settings: LossSpikes
    manager: CheckpointManager | None
    reporter: Reporter
    _losses: deque[float] = field(init=False)
    _spike: tuple[StepReport, float, float] | None = None
    _is_above: bool = False
    _times: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._losses = deque(maxlen=self.settings.window_steps)

    @classmethod
    def of(cls, parts: HookParts) -> WatchLoss | None:
        """Return the hook; None: the job does not want it."""
        settings = parts.job.health.loss_spike
        return None if settings is None else cls(settings, parts.manager, parts.reporter)

    def on_result(self, run: Run, report: StepReport) -> None:
        """Compare the loss of a step with those before it."""
        loss = report.outcome.loss
        if not report.outcome.is_finite or not math.isfinite(loss):
            return
        usual, score = self.compare(loss)
        is_spike = score > self.settings.threshold
        if is_spike and not self._is_above and self._spike is None:
            self._spike = report, usual, score
        self._is_above = is_spike
        if not is_spike or self.settings.action == "warn":  # the loss may stay at another level
            self._losses.append(loss)

    def compare(self, loss: float) -> tuple[float, float]:
        """Return the median, and by how many deviations a loss is above it; zero for the first losses."""
        if len(self._losses) < self.settings.window_steps // 2:
            return loss, 0.0
        median = statistics.median(self._losses)
        deviation = NORMAL * statistics.median(abs(each - median) for each in self._losses)
        return median, (loss - median) / max(deviation, MIN_DEVIATION * abs(median), 1e-30)

    def on_step(self, run: Run) -> RestoreCheckpoint | None:
        """React to a spike; a collective, if there is one.

        Raises:
            NumericError: The loss has spiked too often after the same checkpoint.
        """
        spike, self._spike = self._spike, None
        if spike is None:
            return None
        report, usual, score = spike
        before = self._checkpoint_before(run, report.step) if self.settings.action == "rollback" else None
        if run.world.rank == 0:
            loss = report.outcome.loss
            self.reporter.report(
                LossSpike(step=report.step, loss=loss, usual=usual, score=score, restored=before)
            )
        if before is None:
            return None
        self._is_above = False
        self._times[before] += 1
        why = f"the loss of step {report.step} is {report.outcome.loss:.4g}"
        if self._times[before] > self.settings.max_rollbacks:
            raise NumericError(
                f"{why}: that is spike {self._times[before]} after the checkpoint of step {before}",
                hint="lower lr.base_lr, clip gradients (train.clip_grad_norm), or examine the samples",
            )
        position = round(report.epochs_passed * run.progress.order.num_samples)
        return RestoreCheckpoint(before, f"{why}; its samples are skipped", resume_at=position)

    def _checkpoint_before(self, run: Run, step: int) -> int | None:
        steps = []
        if run.world.rank == 0 and self.manager is not None:
            steps = [each for each in self.manager.steps() if each < step]
        found: int | None = broadcast_json(run.world, max(steps, default=None))
        return found
