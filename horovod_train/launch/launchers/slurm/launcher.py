"""Launcher of jobs in Slurm."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.launchers.batch import SCRIPT, BatchLauncher, How, QueuedJob
from horovod_train.launch.launchers.slurm import Slurm

MAX_ID_CHARS, MAX_PATH_CHARS = 32, 4096

# Job states of Slurm.
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
_ACTIVE = {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_CANCEL = {
    "drain": ("--batch", "--signal=USR2"),
    "stop": ("--batch", "--signal=TERM"),
    "kill": (),
}


class SlurmLauncher(BatchLauncher):
    """Launcher that submits jobs with ``sbatch``."""

    name = "slurm"
    system = "Slurm"
    id_variable = "SLURM_JOB_ID"

    def submit_command(self, request: LaunchRequest, after: str = "") -> tuple[str, ...]:
        """Return the call of sbatch."""
        return ("sbatch", "--parsable", str(request.log_dir / SCRIPT))

    def directives(self, request: LaunchRequest) -> list[str]:
        """Return the options of sbatch."""
        slurm = request.job.launch.settings(Slurm)
        options = {
            "job-name": request.job.name,
            "ntasks": str(request.num_ranks),
            **({"ntasks-per-node": str(slurm.ranks_per_node)} if slurm.ranks_per_node else {}),
            "output": str(self.script_log(request.log_dir)),
            "open-mode": "append",
            # Only to the script, one grace period before the time limit.
            "signal": f"B:USR1@{max(1, round(request.job.launch.grace_s))}",
            **slurm.options,
        }
        return [
            *(f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items()),
            f"#SBATCH --{'requeue' if slurm.requeue else 'no-requeue'}",
        ]

    def submitted_id(self, script: Path) -> str:
        """Return the ID of a job in the queue, by its script."""
        jobs = self.call(
            *("squeue", f"--user={os.getuid()}", "--states=all", "--noheader"),
            f"--Format=JobID:{MAX_ID_CHARS},Command:{MAX_PATH_CHARS}",
        )
        rows = (line.split(maxsplit=1) for line in jobs.splitlines())
        return next((row[0] for row in rows if row[1:] and row[1].strip() == str(script)), "")

    def query(self, native_id: str) -> QueuedJob | None:
        """Return the state of a job."""
        try:
            found = self.call("scontrol", "show", "job", "--oneliner", native_id)
        except LaunchError as error:
            if "Invalid job id" in error.message:
                return None
            raise
        fields = dict(re.findall(r"(\w+)=(\S*)", found))
        shown = fields.get("JobState", "")
        if shown in _WAITING:
            return QueuedJob("waiting", shown, fields.get("Reason", ""))
        if shown == "COMPLETING":
            return QueuedJob("ending", shown)
        if shown in _ACTIVE:
            return QueuedJob("active", shown)
        return QueuedJob("cancelled" if shown.startswith("CANCELLED") else "ended", shown)

    def end(self, native_id: str, how: How, *, is_waiting: bool) -> None:
        """End a job with scancel."""
        self.call("scancel", *(() if is_waiting else _CANCEL[how]), native_id)

    def put_back(self, native_id: str, request: LaunchRequest) -> None:
        """Requeue a job; Slurm terminates this process shortly after."""
        self.call("scontrol", "requeue", native_id)
