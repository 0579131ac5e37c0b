"""Launchers of a batch system: oq-submit prints the ID of a job, oq-state its state."""

from __future__ import annotations

from pathlib import Path

from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.launchers.batch import SCRIPT, AllocationLauncher, BatchLauncher, How, QueuedJob
from horovod_train.launch.launchers.hosts import HorovodrunLauncher
from outside import Queue


class QueueLauncher(BatchLauncher):
    """Launcher that submits jobs with oq-submit."""

    name = "queue"
    system = "Outside Queue"
    id_variable = "OQ_JOB"

    def submit_command(self, request: LaunchRequest, after: str = "") -> tuple[str, ...]:
        """Return the call of oq-submit."""
        settings = request.job.launch.settings(Queue)
        per_node = ("--per-node", str(settings.ranks_per_node)) if settings.ranks_per_node else ()
        wait = ("--after", after) if after else ()
        ranks = ("--ranks", str(request.num_ranks))
        return ("oq-submit", *ranks, *per_node, *settings.options, *wait, str(request.log_dir / SCRIPT))

    def submitted_id(self, script: Path) -> str:
        """Return the ID of a job, by its script."""
        return self.call("oq-find", str(script)).strip()

    def query(self, native_id: str) -> QueuedJob | None:
        """Return the state of a job."""
        shown = self.call("oq-state", native_id).strip()
        return QueuedJob("queued" if shown == "queued" else "active", shown)

    def end(self, native_id: str, how: How, *, is_waiting: bool) -> None:
        """End a job."""
        self.call("oq-end", native_id)


class QueueAllocationLauncher(AllocationLauncher):
    """Launcher that starts ranks on the nodes of a job."""

    batch = QueueLauncher
    hosts_variable = "OQ_HOSTFILE"

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan."""
        return HorovodrunLauncher().plan(request)
