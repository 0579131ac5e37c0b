"""Launcher of one rank in one process, without Horovod, for first tries, tests and debuggers."""

from __future__ import annotations

from horovod_train.config.launch import Launch
from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.launchers.supervised import SupervisedLauncher


class LocalLauncher(SupervisedLauncher):
    """Launcher that starts only the worker."""

    def suits(self, launch: Launch) -> bool:
        """Return whether the job has one rank on this machine."""
        return launch.is_alone

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan.

        Raises:
            LaunchError: The job requests more than one rank.
        """
        if request.num_ranks > 1:
            raise LaunchError(
                f"the launcher 'local' starts one rank, not {request.num_ranks}",
                hint="use launch.launcher: horovodrun",
            )
        return LaunchPlan((request.rank_command,))
