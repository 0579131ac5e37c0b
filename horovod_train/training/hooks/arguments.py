"""Arguments of the optimizer that follow schedules (``optimizer.schedules``)."""

from __future__ import annotations

from horovod_train.frameworks.base import SchedulesArguments
from horovod_train.lr.arguments import ArgumentSchedules
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.run import Run


class ScheduleArguments(Hook):
    """Sets arguments of the optimizer before each step."""

    _schedules: ArgumentSchedules

    @classmethod
    def of(cls, parts: HookParts) -> ScheduleArguments | None:
        """Return the hook; None: the job has no such schedules."""
        return cls() if parts.job.optimizer.schedules else None

    def on_start(self, run: Run) -> None:
        """Set the arguments of the first step."""
        schedules = run.job.optimizer.schedules
        self._schedules = ArgumentSchedules(schedules, run.policy.total_epochs, run.in_epochs)
        self.on_step(run)

    def on_step(self, run: Run) -> None:
        """Set the arguments of the next step."""
        assert isinstance(run.replica, SchedulesArguments)  # the rules refuse other frameworks
        run.replica.set_arguments(self._schedules.at(run.schedule_epochs))
