"""Prometheus metrics of this rank."""

from __future__ import annotations

from horovod_train.telemetry.recorder import Recorder
from horovod_train.telemetry.records import EvaluatingRecord, EvaluationRecord
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.parts import record_step
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.run import Run


class RecordMetrics(Hook):
    """Records this rank's Prometheus metrics."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @classmethod
    def of(cls, parts: HookParts) -> RecordMetrics | None:
        """Return the hook; None: the job has no metrics."""
        return cls(parts.recorder) if parts.job.metrics.enabled else None

    def on_reading(self, run: Run, report: StepReport) -> None:
        """Record the step."""
        record_step(self._recorder, report)

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """Record the begin and the end of an evaluation, during which no steps are performed; its results."""
        self._recorder.record(EvaluatingRecord(begins))
        if not begins:
            self._recorder.record(EvaluationRecord(run.progress.metrics))
