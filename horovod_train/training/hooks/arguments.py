"""Arguments of the optimizer that follow schedules (``optimizer.schedules``)."""

from __future__ import annotations

from horovod_train.frameworks.base import SchedulesArguments
from horovod_train.lr.arguments import ArgumentSchedules
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.run import Run


class ScheduleArguments(Hook):
    """Sets arguments of the optimizer before each step."""

    def __init__(self, schedules: ArgumentSchedules) -> None:
        self._schedules = schedules

    @classmethod
    def of(cls, parts: HookParts) -> ScheduleArguments | None:
        """Return the hook; None: the job has no such schedules."""
        schedules, epochs = parts.job.optimizer.schedules, parts.job.train.epochs
        return cls(ArgumentSchedules(schedules, epochs)) if schedules else None

    def on_start(self, run: Run) -> None:
        """Set the arguments of the first step."""
        self.on_step(run)

    def on_step(self, run: Run) -> None:
        """Set the arguments of the next step."""
        assert isinstance(run.replica, SchedulesArguments)  # the rules refuse other frameworks
        run.replica.set_arguments(self._schedules.at(run.schedule_epochs))
