"""Launchers of a batch system, whose programs print one line: the ID of a job, or its state."""

from __future__ import annotations

from pathlib import Path

from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.launchers.batch import (
    SCRIPT,
    AllocationLauncher,
    BatchLauncher,
    BatchState,
    BatchStatus,
    How,
)
from horovod_train.launch.launchers.hosts import HorovodrunLauncher
from outside import QUEUE, Queue

STATES: dict[str, BatchState] = {"queued": "queued", "running": "active", "ended": "ended"}
SIGNALS = {"drain": "USR2", "stop": "TERM", "kill": "KILL"}


class QueueLauncher(BatchLauncher):
    """Launcher that submits jobs with oq-submit."""

    batch_system = QUEUE
    id_variable = "OQ_JOB"

    def submit_command(self, request: LaunchRequest, after: str = "") -> tuple[str, ...]:
        """Return the call of oq-submit; arguments after the script are passed to it."""
        settings = request.job.launch.settings(Queue)
        per_node = ("--per-node", str(settings.ranks_per_node)) if settings.ranks_per_node else ()
        wait = ("--after", after) if after else ()
        ranks = ("--ranks", str(request.num_ranks))
        script = (str(request.log_dir / SCRIPT), *((after,) if after else ()))
        return ("oq-submit", *ranks, *per_node, *settings.options, *wait, *script)

    def submitted_id(self, script: Path) -> str:
        """Return the ID of a job, by its script."""
        return self.call("oq-find", str(script)).strip()

    def query(self, native_id: str) -> BatchStatus | None:
        """Return the state of a job; None: the queue does not know it."""
        shown = self.call("oq-state", native_id).strip()
        return BatchStatus(STATES[shown], shown) if shown in STATES else None

    def end(self, native_id: str, how: How, *, is_waiting: bool) -> None:
        """End a job by a signal to its script."""
        self.call("oq-end", native_id, SIGNALS[how])


class QueueAllocationLauncher(AllocationLauncher):
    """Launcher that starts ranks on the nodes of a job."""

    batch = QueueLauncher
    hosts_variable = "OQ_HOSTFILE"

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan."""
        return HorovodrunLauncher().plan(request)
