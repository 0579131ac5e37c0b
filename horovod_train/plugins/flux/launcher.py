"""Launchers of jobs in Flux (flux-core).

``flux batch`` runs the script in a Flux instance of its own, whose brokers run on the nodes of the job:

    jobs         flux batch, flux jobs, flux cancel
    signals      A broker answers signals with SIGHUP to the script, or ends (SIGUSR1, SIGUSR2): the script
                 stores its PID in the instance, and ``flux proxy`` signals that process.
    nodes        ``flux hostlist instance``; they are reached by ``flux exec``
    time limit   ``flux jobs`` of the enclosing instance (``flux --parent``)

These launchers were tested with a program that answers as the manual pages and the source of flux-core say;
they were not run on Flux.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from horovod_train.config.fields import words_of
from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan, LaunchRequest, call
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.launchers.batch import (
    SCRIPT,
    AllocationLauncher,
    BatchLauncher,
    BatchState,
    BatchStatus,
    How,
)
from horovod_train.launch.mpi import mpi_of, start_of
from horovod_train.plugins.flux import FLUX, Flux

SLOTS = "HOROVOD_TRAIN_FLUX_SLOTS"
"""Variable in the script: ranks on each node."""

PID = "horovod_train_pid"
"""Key of the instance with the PID of the script, which the launcher replaces."""

ON_NODE = 'exec flux exec --rank "$(flux hostlist --find="$1" instance)" /bin/sh -c'
"""Beginning of a shell command that runs a command on the node ``$1``."""

_SIGNALS = {"drain": ("USR2",), "stop": ("TERM",), "kill": ("TERM", "TERM")}
_STATES: dict[str, BatchState] = {
    **dict.fromkeys(("DEPEND", "PRIORITY", "SCHED"), "queued"),
    "RUN": "active",
    "CLEANUP": "ending",
    "INACTIVE": "ended",
}


class FluxLauncher(BatchLauncher):
    """Launcher that submits jobs with ``flux batch``."""

    batch_system = FLUX
    id_variable = "HOROVOD_TRAIN_FLUX_ID"

    def submit_command(self, request: LaunchRequest, after: str = "") -> tuple[str, ...]:
        """Return the call of flux batch; job IDs are in decimal notation everywhere."""
        settings = request.job.launch.settings(Flux)
        per_node, num_nodes = slots_of(request)
        batch = (
            *(
                "flux",
                *(("--parent",) if after else ()),
                "batch",
                f"--job-name={request.job.name}/{request.run_id}",
            ),
            *(f"--nodes={num_nodes}", f"--nslots={num_nodes * per_node}"),
            *(f"--output={self.script_log(request.log_dir)}", "-o", "output.mode=append"),
            *words_of(settings.options),
            *((f"--dependency=afterany:{after}",) if after else ()),
            *(str(request.log_dir / SCRIPT), *((after,) if after else ())),
        )
        return ("/bin/sh", "-c", f'id=$({shlex.join(batch)}) && flux job id --to=dec "$id"')

    def preamble(self, request: LaunchRequest) -> list[str]:
        """Return the definitions of variables: Flux has none with the ID of the script's own job."""
        per_node, _ = slots_of(request)
        return [
            f'export {self.id_variable}="$(flux job id --to=dec "$(flux getattr jobid)")"',
            f"export {SLOTS}={per_node}",
            f"flux kvs put {PID}=$$",
        ]

    def submitted_id(self, script: Path) -> str:
        """Return the ID of a job, by its name."""
        name = f"{script.parent.parent.name}/{script.parent.name}"
        found = self.call("flux", "jobs", "-a", "--no-header", "--format={id.dec}", f"--name={name}")
        return found.split()[0] if found.split() else ""

    def query(self, native_id: str) -> BatchStatus | None:
        shown = "{state} {result} {returncode} {exception.note}"
        try:
            found = self.call("flux", "jobs", "-a", "--no-header", f"--format={shown}", native_id)
        except LaunchError as error:
            if "unknown" in error.message.lower():
                return None
            raise
        words = found.split()
        if not words:
            return None
        state = _STATES.get(words[0], "active")
        if words[1:2] == ["CANCELED"]:
            state = "cancelled"
        return BatchStatus(state, " ".join(words), "" if state == "active" else " ".join(words))

    def end(self, native_id: str, how: How, *, is_waiting: bool) -> None:
        """End a job by a signal to its launcher, or remove it from the queue with flux cancel."""
        if is_waiting:
            self.call("flux", "cancel", native_id)
            return
        for name in _SIGNALS[how]:
            inside = f'flux exec --noinput --rank 0 kill -s {name} "$(flux kvs get {PID})"'
            self.call("flux", "proxy", native_id, "/bin/sh", "-c", inside)


class FluxAllocationLauncher(AllocationLauncher):
    """Launcher that starts ranks in a Flux instance, with the process manager of the MPI library."""

    batch = FluxLauncher

    def hosts(self, environ: Mapping[str, str]) -> list[str]:
        """Return the nodes of the instance as ``host:slots``.

        Raises:
            LaunchError: This process is in no instance, or Flux does not respond.
        """
        if "FLUX_URI" not in environ:
            raise self.no_allocation()
        names = call("flux", "hostlist", "--expand", "instance").split()
        per_node = int(environ.get(SLOTS, 0))
        if not per_node:  # a script of the user's
            cores = call("flux", "resource", "list", "--states=all", "--no-header", "--format={ncores}")
            per_node = max(1, int(cores.split()[0]) // len(names))
        return [f"{name}:{per_node}" for name in names]

    def shell(self, request: LaunchRequest, host: Host) -> list[str]:
        """Return the command prefix that runs a command on a node."""
        return ["/bin/sh", "-c", f'{ON_NODE} "$2"', "sh", host.name]

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        remote_shell = request.log_dir / "flux-exec"
        request = replace(request, own_remote_shell=(str(remote_shell),))
        plan = start_of(mpi_of(request), request, request.hosts).plan(request)
        script = f'#!/bin/sh\nhost=$1\nshift\ncommand="$*"\nset -- "$host"\n{ON_NODE} "$command"\n'
        return replace(plan, files={**plan.files, remote_shell: script})

    def time_limit_s(self, native_id: str) -> float:
        found = call("flux", "--parent", "jobs", "--no-header", "--format={duration}", native_id)
        return float(found.strip() or 0) or math.inf


def slots_of(request: LaunchRequest) -> tuple[int, int]:
    """Return the ranks on each node and the number of nodes."""
    per_node = min(request.job.launch.settings(Flux).ranks_per_node or request.num_ranks, request.num_ranks)
    return per_node, -(-request.num_ranks // per_node)
