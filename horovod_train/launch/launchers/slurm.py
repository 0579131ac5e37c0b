"""Launcher of jobs in Slurm: a batch script, which runs the job on its allocated nodes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from horovod_train.config.load import dump_job
from horovod_train.errors import LaunchError, UnansweredError
from horovod_train.launch.base import JobStatus, LaunchPlan, LaunchRequest, PolledLauncher, State, Submitted
from horovod_train.launch.jobs import LOG_FILE, StateFile, mark_cancelled
from horovod_train.launch.launchers.supervised import read_log

TIMEOUT_S = 30.0
MAX_ID_CHARS, MAX_PATH_CHARS = 32, 4096
SCRIPT_LOG = "slurm.log"
SCRIPT = "batch.sh"
CLAIM = "slurm-job-id"
"""File with the ID of the Slurm job that carries out the run."""

# Job states of Slurm.
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
_ACTIVE = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_CANCEL = {
    "drain": ("--batch", "--signal=USR2"),
    "stop": ("--batch", "--signal=TERM"),
    "kill": (),
}


class SlurmLauncher(PolledLauncher):
    """Launcher that submits jobs with ``sbatch``."""

    has_local_files = True

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan: a batch script, and the command that submits it."""
        script = request.log_dir / SCRIPT
        launch = request.job.launch.model_copy(update={"launcher": "slurm-allocation", "hosts": []})
        inner = request.job.model_copy(update={"launch": launch})
        return LaunchPlan(
            ("sbatch", "--parsable", str(script)),
            files={script: batch_script(request), request.log_dir / "request.json": dump_job(inner)},
        )

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        """Submit the job, and return its Slurm job ID."""
        if started := _native_id(request.log_dir):
            return started
        plan.write_files()
        return call_slurm(*plan.argv).strip().partition(";")[0]

    def status(self, job: Submitted) -> JobStatus:
        """Return the status of a job, from Slurm's state and from the job's state file."""
        own = StateFile(job.log_dir).read_recorded()
        native_id = _native_id(job.log_dir, job.native_id)
        if not native_id:
            return JobStatus("waiting", message="not in Slurm's queue: its submission was interrupted")
        fields = _query_slurm(native_id)
        state = fields.get("JobState", "")
        if state in _WAITING:
            return JobStatus("waiting", message=f"in Slurm's queue: {fields.get('Reason', '')}")
        if state in _ACTIVE:
            # The final state may be that of an attempt before the job was requeued.
            is_old = own.has_ended and state != "COMPLETING"
            return JobStatus("starting") if is_old or own.state == "waiting" else own
        return own if own.has_ended else _status_without_state_file(state, own, job.log_dir / SCRIPT_LOG)

    def logs(self, job: Submitted, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a job's output."""
        log = job.log_dir / LOG_FILE
        yield from read_log(log, lambda: follow and self.is_running(job))
        if not log.exists():  # the job failed before it opened its log
            yield from read_log(job.log_dir / SCRIPT_LOG, lambda: False)

    def cancel(self, job: Submitted, how: Literal["drain", "stop", "kill"]) -> None:
        """End a job; a job that waits is removed from the queue."""
        status = self.status(job)
        if status.has_ended:
            return
        if how != "drain":
            mark_cancelled(job.log_dir)
        flags = () if status.state == "waiting" else _CANCEL[how]
        if native_id := _native_id(job.log_dir, job.native_id):
            call_slurm("scancel", *flags, native_id)


def batch_script(request: LaunchRequest) -> str:
    """Return the batch script, which Slurm runs on the first node of the job."""
    launch = request.job.launch
    slurm = launch.slurm
    options = {
        "job-name": request.job.name,
        "ntasks": str(request.num_ranks),
        **({"ntasks-per-node": str(slurm.ranks_per_node)} if slurm.ranks_per_node else {}),
        "output": str(request.log_dir / SCRIPT_LOG),
        "open-mode": "append",
        # Only to the script, one grace period before the time limit.
        "signal": f"B:USR1@{max(1, round(launch.grace_s))}",
        **slurm.options,
    }
    run_attempt = shlex.join(
        (
            *(sys.executable, "-P", "-m", "horovod_train", "run", str(request.log_dir / "request.json")),
            *("--resolved", "--run-id", request.run_id),
        )
    )
    claim = shlex.quote(str(request.log_dir / CLAIM))
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items()),
            f"#SBATCH --{'requeue' if slurm.requeue else 'no-requeue'}",
            # If this run was submitted several times, only one job continues. A requeued job keeps its ID.
            f'(set -C; echo "$SLURM_JOB_ID" >{claim}) 2>/dev/null',
            f'[ "$(cat {claim})" = "$SLURM_JOB_ID" ] || exit 0',
            *slurm.setup,
            f"cd {shlex.quote(str(request.folder))}",
            # Replaces the script, so that it receives Slurm's signals.
            f"exec {run_attempt}",
            "",
        ]
    )


def _native_id(log_dir: Path, submitted: str = "") -> str:
    """Return the ID of the Slurm job of a run, running or queued; empty: none.

    Args:
        log_dir: Run folder.
        submitted: ID of the job that was submitted; empty: unknown.

    Raises:
        LaunchError: Slurm does not respond.
    """
    with suppress(OSError):
        if claimed := (log_dir / CLAIM).read_text(encoding="utf-8").strip():
            return claimed
    if submitted or not (log_dir / SCRIPT).exists():
        return submitted
    # sbatch was called, and this process or an earlier one was killed before it had read the ID.
    of_this_account = ("squeue", f"--user={os.getuid()}", "--states=all", "--noheader")
    jobs = call_slurm(*of_this_account, f"--Format=JobID:{MAX_ID_CHARS},Command:{MAX_PATH_CHARS}")
    rows = (line.split(maxsplit=1) for line in jobs.splitlines())
    return next((row[0] for row in rows if row[1:] and row[1].strip() == str(log_dir / SCRIPT)), "")


def _query_slurm(native_id: str) -> dict[str, str]:
    """Return the fields of a job in Slurm; empty: Slurm no longer knows the job.

    Raises:
        LaunchError: Slurm does not respond.
    """
    try:
        found = call_slurm("scontrol", "show", "job", "--oneliner", native_id)
    except LaunchError as error:
        if "Invalid job id" in error.message:
            return {}
        raise
    return dict(re.findall(r"(\w+)=(\S*)", found))


def _status_without_state_file(slurm_state: str, own: JobStatus, log: Path) -> JobStatus:
    """Return the status of a job without a final state in its state file, from Slurm's state."""
    if slurm_state.startswith("CANCELLED"):
        return JobStatus("cancelled", 143, f"cancelled in Slurm; before that: {own}")
    if slurm_state == "COMPLETED":
        return JobStatus("failed", 1, "Slurm reports COMPLETED, but the state file has no final state")
    state: State = "failed"
    shown = slurm_state or "no job with this ID"
    return JobStatus(state, 1, f"Slurm reports {shown}; see {log}")


def call_slurm(*command: str, check: bool = True) -> str:
    """Run a command of Slurm, and return its output; with ``check``, a nonzero exit code is an error.

    Raises:
        LaunchError: The command is not installed, does not respond, or fails; contains its message.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise LaunchError(
            f"{command[0]} is not installed here", hint="submit from a login node of the cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UnansweredError(
            f"{command[0]} did not answer within {TIMEOUT_S:g} s", hint="check slurmctld: `scontrol ping`"
        ) from error
    if check and done.returncode:
        raise LaunchError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
