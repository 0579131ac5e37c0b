"""One rank in one process, without Horovod: a first look, a test, a debugger."""

from __future__ import annotations

from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.launchers.supervised import SupervisedLauncher


class LocalLauncher(SupervisedLauncher):
    """Starts the worker and nothing around it."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan.

        Raises:
            LaunchError: More than one rank is wanted.
        """
        if request.num_ranks > 1:
            raise LaunchError(
                f"the launcher 'local' starts one rank, not {request.num_ranks}",
                hint="use launch.launcher: horovodrun",
            )
        return LaunchPlan((request.rank_command,))
