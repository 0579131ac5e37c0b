"""PBS (OpenPBS, PBS Professional 19 and later).

PbsLauncher             submits jobs
PbsAllocationLauncher   starts ranks on the hosts of this process's PBS job
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from horovod_train.config.fields import words_of
from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.launchers.batch import (
    SCRIPT,
    AllocationLauncher,
    BatchLauncher,
    BatchState,
    BatchStatus,
    How,
    seconds,
)
from horovod_train.launch.launchers.hosts import HorovodrunLauncher, MpirunLauncher
from horovod_train.plugins.pbs import PBS, Pbs

# Job states of PBS that are not "active": queued, held, waiting, in transit, moved, begun (arrays);
# exiting; finished, expired.
_STATES: dict[str, BatchState] = {
    **dict.fromkeys(("Q", "H", "W", "T", "M", "B"), "queued"),
    "E": "ending",
    "F": "ended",
    "X": "ended",
}
_DELETED = "91"
"""Substate of a finished job that was deleted."""

_SIGNALS = {"drain": ("SIGUSR2",), "stop": ("SIGTERM",), "kill": ("SIGTERM", "SIGTERM")}


class PbsLauncher(BatchLauncher):
    """Launcher that submits jobs with ``qsub`` of PBS."""

    batch_system = PBS
    id_variable = "PBS_JOBID"

    def submit_command(self, request: LaunchRequest, after: str = "") -> tuple[str, ...]:
        settings = request.job.launch.settings(Pbs)
        return (
            *("qsub", "-N", request.job.name),
            # Written during the run, and appended to.
            *("-koed", "-j", "oe", "-o", str(self.script_log(request.log_dir))),
            *("-r", "y" if settings.requeue else "n"),
            *("-l", f"select={select(request)}"),
            *(("-l", "place=scatter") if settings.ranks_per_node else ()),
            *words_of(settings.options),
            # Of several dependencies, the last one counts: that of the job's options has been met.
            *(("-W", f"depend=afterany:{after}") if after else ()),
            # A script, instead of a program, would be run by a login shell, which signals would end.
            *("--", "/bin/bash", "-l", str(request.log_dir / SCRIPT)),
            *((after,) if after else ()),
        )

    def programs(self) -> Path | None:
        """Return the folder of PBS's programs, from its configuration file."""
        try:
            text = Path(os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf")).read_text(encoding="utf-8")
        except OSError:
            return None
        found = re.search(r"^\s*PBS_EXEC\s*=\s*(\S+)", text, re.MULTILINE)
        return Path(found[1]) / "bin" if found else None

    def submitted_id(self, script: Path) -> str:
        jobs = re.split(r"^Job Id: ", self.call("qstat", "-f"), flags=re.MULTILINE)[1:]
        of_this_run = (job for job in jobs if f" {script} " in f"{_fields(job).get('Submit_arguments')} ")
        return next((job.split(maxsplit=1)[0] for job in of_this_run), "")

    def query(self, native_id: str) -> BatchStatus | None:
        fields = self.fields(native_id)
        if not fields:
            return None
        letter = fields.get("job_state", "")
        state = _STATES.get(letter, "active")
        if state == "ended" and fields.get("substate") == _DELETED:
            state = "cancelled"
        comment = fields.get("comment", "")
        shown = f"state {letter}, exit status {fields.get('Exit_status', '(none)')}"
        return BatchStatus(state, f"{shown}: {comment}" if comment else shown, comment)

    def fields(self, native_id: str) -> dict[str, str]:
        """Return the attributes of a job; empty: PBS does not know the job."""
        try:
            # -x: also of a job that has ended, if the server keeps it.
            return _fields(self.call("qstat", "-x", "-f", native_id))
        except LaunchError as error:
            if "Unknown Job Id" in error.message:
                return {}
            raise

    def end(self, native_id: str, how: How, *, is_waiting: bool) -> None:
        """End a job with qsig, or remove it from the queue with qdel."""
        if is_waiting:
            self.call("qdel", native_id)
            return
        for name in _SIGNALS[how]:  # qdel would kill the processes on the first node only, and after seconds
            self.call("qsig", "-s", name, native_id)


def select(request: LaunchRequest) -> str:
    """Return the chunks that ranks need, such as ``2:ncpus=4:mpiprocs=4+1:ncpus=1:mpiprocs=1``."""
    settings, ranks = request.job.launch.settings(Pbs), request.num_ranks
    per_chunk = min(settings.ranks_per_node or 1, ranks)
    whole, rest = divmod(ranks, per_chunk)
    chunks = [(whole, per_chunk), (1, rest)] if rest else [(whole, per_chunk)]
    return "+".join(f"{count}:{settings.chunk or f'ncpus={size}'}:mpiprocs={size}" for count, size in chunks)


def _fields(printed: str) -> dict[str, str]:
    r"""Return the attributes that ``qstat -f`` prints for one job; long values are continued after a tab.

    >>> _fields("Job Id: 7.server\n    job_state = R\n    comment = Job run at\n\t noon\n")
    {'job_state': 'R', 'comment': 'Job run at noon'}
    """
    return dict(re.findall(r"^ {4}([\w.]+) = (.*)$", printed.replace("\n\t", ""), re.MULTILINE))


class PbsAllocationLauncher(AllocationLauncher):
    """Launcher that starts ranks in a PBS job: with mpirun, or with horovodrun for the Gloo controller.

    Hosts are reached by ssh, because PBS's own remote shell (``pbs_tmrsh``) does not pass on standard
    input.
    """

    batch = PbsLauncher
    hosts_variable = "PBS_NODEFILE"

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        is_mpi = request.job.launch.controller == "mpi"
        return (MpirunLauncher() if is_mpi else HorovodrunLauncher()).plan(request)

    def time_limit_s(self, native_id: str) -> float:
        return seconds(PbsLauncher().fields(native_id).get("Resource_List.walltime", "INFINITY"))
