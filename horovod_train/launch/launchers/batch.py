"""Base class of launchers that submit a batch script, which runs the job on its allocated nodes.

.. code-block:: text

                  submit     status             end                requeue
    slurm         sbatch     squeue, scontrol   scancel            scontrol requeue
    pbs           qsub       qstat              qsig, qdel         qsub, after the end of this job
    gridengine    qsub       qstat              qdel               qsub, after the end of this job
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from horovod_train.config.batch import Batch
from horovod_train.config.load import dump_job
from horovod_train.launch.base import JobStatus, LaunchPlan, LaunchRequest, PolledLauncher, Submitted
from horovod_train.launch.commands import call
from horovod_train.launch.jobs import LOG_FILE, StateFile, mark_cancelled, was_cancelled
from horovod_train.launch.launchers.supervised import read_log
from horovod_train.system.files import write_atomic

SCRIPT = "batch.sh"

How = Literal["drain", "stop", "kill"]
BatchState = Literal["waiting", "active", "ending", "cancelled", "ended"]


@dataclass(frozen=True)
class QueuedJob:
    """State of a job in a batch system.

    Attributes:
        state: waiting: in the queue; active: has nodes; ending: has nodes, and its script has ended;
            cancelled, ended: has left the queue, and the batch system still knows it.
        shown: State in the words of the batch system.
        reason: Reason for which the job waits; may be empty.
    """

    state: BatchState
    shown: str
    reason: str = ""


class BatchLauncher(PolledLauncher):
    """Base class of launchers of batch systems; subclasses call the programs of one batch system.

    Attributes:
        name: Name of the launcher, and of its section in ``launch``.
        system: Name of the batch system in messages.
        id_variable: Environment variable of the job ID in the batch script.
    """

    has_local_files = True
    queries_a_server = True
    name: str
    system: str
    id_variable: str

    def submit_command(self, request: LaunchRequest, after: str = "") -> tuple[str, ...]:
        """Return the command that submits the batch script, and prints the job ID in its last line.

        Args:
            request: Job and run.
            after: ID of the job that the submitted job continues, after its end.
        """
        raise NotImplementedError

    def directives(self, request: LaunchRequest) -> list[str]:
        """Return the options in the batch script, as comments that the batch system reads."""
        return []

    def submitted_id(self, script: Path) -> str:
        """Return the ID of a job of this account in the queue, by its script; empty: none.

        Raises:
            LaunchError: The batch system does not respond.
        """
        raise NotImplementedError

    def query(self, native_id: str) -> QueuedJob | None:
        """Return the state of a job in the batch system; None: it does not know the job.

        Raises:
            LaunchError: The batch system does not respond.
        """
        raise NotImplementedError

    def end(self, native_id: str, how: How, *, is_waiting: bool) -> None:
        """End a job, or remove it from the queue if it waits."""
        raise NotImplementedError

    def settings(self, request: LaunchRequest) -> Batch:
        """Return the section of the job for this batch system."""
        settings: Batch = getattr(request.job.launch, self.name)
        return settings

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan: a batch script, and the command that submits it."""
        script = request.log_dir / SCRIPT
        launch = request.job.launch.model_copy(update={"launcher": f"{self.name}-allocation", "hosts": []})
        inner = request.job.model_copy(update={"launch": launch})
        return LaunchPlan(
            self.submit_command(request),
            files={script: self.script(request), request.log_dir / "request.json": dump_job(inner)},
        )

    def script(self, request: LaunchRequest) -> str:
        """Return the batch script, which runs on the first node of the job."""
        run_attempt = shlex.join(
            (
                *(sys.executable, "-P", "-m", "horovod_train", "run", str(request.log_dir / "request.json")),
                *("--resolved", "--run-id", request.run_id),
            )
        )
        claim, own_id = shlex.quote(str(self.claim(request.log_dir))), f'"${self.id_variable}"'
        return "\n".join(
            [
                "#!/bin/bash",
                *self.directives(request),
                # If this run was submitted several times, only one job continues. A requeued job keeps its
                # ID (Slurm), or its argument is the ID of the job that it continues.
                f"(set -C; echo {own_id} >{claim}) 2>/dev/null",
                f'[ "$(cat {claim})" != "$1" ] || echo {own_id} >{claim}',
                f'[ "$(cat {claim})" = {own_id} ] || exit 0',
                *self.settings(request).setup,
                f"cd {shlex.quote(str(request.folder))}",
                # Replaces the script, so that it receives the signals of the batch system.
                f"exec {run_attempt}",
                "",
            ]
        )

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        """Submit the job, and return its ID in the batch system."""
        if started := self._native_id(request.log_dir):
            return started
        plan.write_files()
        return self._submitted(*plan.argv)

    def _submitted(self, *command: str) -> str:
        return self.call(*command).strip().rpartition("\n")[2].partition(";")[0]

    def status(self, job: Submitted) -> JobStatus:
        """Return the status of a job, from the batch system and from the job's state file."""
        native_id = self._native_id(job.log_dir, job.native_id)
        if not native_id:
            return JobStatus(
                "waiting", message=f"not in {self.system}'s queue: its submission was interrupted"
            )
        queued = self.query(native_id)
        # Read afterwards, because a job that has ended has written its final state before.
        own = StateFile(job.log_dir).read_recorded()
        if queued is not None and queued.state == "waiting":
            return JobStatus("waiting", message=f"in {self.system}'s queue: {queued.reason or queued.shown}")
        if queued is not None and queued.state in ("active", "ending"):
            # The final state may be that of an attempt before the job was requeued.
            is_old = own.has_ended and queued.state != "ending"
            return JobStatus("starting") if is_old or own.state == "waiting" else own
        if own.has_ended:
            return own
        if (queued is not None and queued.state == "cancelled") or was_cancelled(job.log_dir):
            return JobStatus("cancelled", 143, f"cancelled in {self.system}; before that: {own}")
        shown = "no job with this ID" if queued is None else queued.shown
        return JobStatus(
            "failed",
            1,
            f"{self.system} reports {shown}, but the state file has no final state: see "
            f"{self.script_log(job.log_dir)}",
        )

    def logs(self, job: Submitted, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a job's output."""
        log = job.log_dir / LOG_FILE
        yield from read_log(log, lambda: follow and self.is_running(job))
        if not log.exists():  # the job failed before it opened its log
            yield from read_log(self.script_log(job.log_dir), lambda: False)

    def cancel(self, job: Submitted, how: How) -> None:
        """End a job; a job that waits is removed from the queue."""
        status = self.status(job)
        if status.has_ended:
            return
        is_waiting = status.state == "waiting"
        if how != "drain" or is_waiting:
            mark_cancelled(job.log_dir)
        if native_id := self._native_id(job.log_dir, job.native_id):
            self.end(native_id, how, is_waiting=is_waiting)

    def programs(self) -> Path | None:
        """Return the folder of the batch system's programs; None: they are on PATH."""
        return None

    def call(self, program: str, *arguments: str) -> str:
        """Run a program of the batch system, and return its output."""
        folder = self.programs()
        own = str(folder / program) if folder is not None and (folder / program).exists() else program
        return call(own, *arguments, hint=f"check whether the server of {self.system} is running")

    def put_back(self, native_id: str, request: LaunchRequest) -> None:
        """Requeue the job in which this process runs: a new job starts after the end of this one.

        Raises:
            LaunchError: The batch system rejects the job.
        """
        new_id = self._submitted(*self.submit_command(request, native_id))
        write_atomic(self.claim(request.log_dir), f"{new_id}\n")

    def _native_id(self, log_dir: Path, submitted: str = "") -> str:
        """Return the ID of the batch job of a run, running or queued; empty: none.

        Args:
            log_dir: Run folder.
            submitted: ID of the job that was submitted; empty: unknown.

        Raises:
            LaunchError: The batch system does not respond.
        """
        with suppress(OSError):
            if claimed := self.claim(log_dir).read_text(encoding="utf-8").strip():
                return claimed
        if submitted or not (log_dir / SCRIPT).exists():
            return submitted
        # The job was submitted, and this process or an earlier one was killed before it had read the ID.
        return self.submitted_id(log_dir / SCRIPT)

    def claim(self, log_dir: Path) -> Path:
        """Return the file with the ID of the batch job that carries out a run."""
        return log_dir / f"{self.name}-job-id"

    def script_log(self, log_dir: Path) -> Path:
        """Return the file with the output of the batch script."""
        return log_dir / f"{self.name}.log"
