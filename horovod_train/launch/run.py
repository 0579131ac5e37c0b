"""Start a job and stay with it to its end: what ``horovod-train run`` does."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from time import strftime
from typing import TextIO

from horovod_train.config.load import dump_job
from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, describe_ranks
from horovod_train.events import Event, parse_line
from horovod_train.launch.base import Launcher, LaunchPlan, LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.process import Ended, execute
from horovod_train.launch.targets import write_targets
from horovod_train.registry import LAUNCHERS

TARGETS_FILE = "prometheus-targets.json"
NUM_LAST_LINES = 20


def resolve(job: Job, run_id: str | None = None) -> LaunchRequest:
    """Fill in what depends on this machine: paths and the number of ranks."""
    launch = job.launch
    slots = sum(int(host.rpartition(":")[2]) for host in launch.hosts)
    num_ranks = launch.num_ranks or slots or 1
    is_alone = num_ranks == 1 and not launch.hosts
    launcher = ("local" if is_alone else "horovodrun") if launch.launcher == "auto" else launch.launcher
    base = Path(job.run_dir).expanduser().resolve()
    changed = job.model_copy(
        update={
            "run_dir": str(base),
            "launch": launch.model_copy(update={"num_ranks": num_ranks, "launcher": launcher}),
        }
    )
    if job.checkpoint.dir is not None:
        folder = str(Path(job.checkpoint.dir).expanduser().resolve())
        changed = changed.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"dir": folder})})
    return LaunchRequest(changed, run_id or strftime("%Y%m%d-%H%M%S"), base / job.name)


def make_plan(request: LaunchRequest) -> LaunchPlan:
    """Return what ``run`` would do.

    Raises:
        UnknownNameError: There is no such launcher.
        LaunchError: It cannot start such a job here.
    """
    launcher: Launcher = LAUNCHERS.load(request.job.launch.launcher)()
    plan = launcher.plan(request)
    return LaunchPlan(plan.argv, plan.env, {**plan.files, request.job_file: dump_job(request.job)})


def run_plan(request: LaunchRequest, plan: LaunchPlan, console: JobConsole) -> int:
    """Carry out a plan, show it, and return the exit code that tells how the ranks ended."""
    request.log_dir.mkdir(parents=True, exist_ok=True)
    with (request.log_dir / "run.log").open("w", encoding="utf-8") as log:
        watcher = Watcher(request, console, log)
        try:
            ended = execute(plan, watcher.see)
        finally:
            console.close()
            watcher.forget_targets()
    return watcher.verdict(ended)


@dataclass
class Watcher:
    """Follows the output of a job and knows in the end how it went."""

    request: LaunchRequest
    console: JobConsole
    log: TextIO
    causes: list[Event] = field(default_factory=list)
    consequences: list[Event] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    has_summary: bool = False
    _log_is_broken: bool = False
    _targets: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    _untagged: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LAST_LINES))

    def see(self, line: str) -> None:
        """Take one line of output."""
        self._keep(line)
        rank, text, event = parse_line(line)
        if event is not None:
            self._see_event(event)
        elif CHATTER.search(text):
            return  # the log has it
        elif rank is not None:
            self.console.print(f"[rank {rank}] {text}")
        elif self.request.num_ranks == 1:
            self.console.print(text)
        elif text.strip():
            # Launchers speak at length of what ranks have already said; kept for when they have not.
            self._untagged.append(text)
            if killed := _killed_rank("\n".join(self._untagged)):
                self.killed.append(killed)

    def _see_event(self, event: Event) -> None:
        if event.kind == "targets":
            self._targets += [(address, labels) for address, labels in event.fields["targets"]]
            self._write_targets(self._targets)
        elif event.kind == "failure":
            (self.causes if event.fields["is_cause"] else self.consequences).append(event)
        else:
            self.has_summary |= event.kind == "summary"
            self.console.show(event)

    def forget_targets(self) -> None:
        """Tell Prometheus that there is nothing left to scrape."""
        if self._targets:
            self._write_targets([])

    def _write_targets(self, targets: list[tuple[str, dict[str, str]]]) -> None:
        try:
            write_targets(self.request.run_dir / TARGETS_FILE, targets)
        except OSError as error:
            self.console.print(f"warning: Prometheus' targets were not written: {error.strerror}")

    def _keep(self, line: str) -> None:
        """Write a line to the log; a full disk is no reason to lose the job."""
        try:
            self.log.write(line + "\n")
            self.log.flush()
        except OSError as error:
            if not self._log_is_broken:
                self._log_is_broken = True
                self.console.print(f"warning: {self.log.name} is incomplete: {error.strerror}")

    def verdict(self, ended: Ended) -> int:
        """Return the exit code of the run; raise the one error that explains a failure.

        Raises:
            LaunchError: The ranks did not end well. Its exit code is that of the cause.
        """
        if ended.stopped_by is not None:
            raise _with_code(LaunchError(f"stopped by signal {ended.stopped_by}"), 128 + ended.stopped_by)
        if self.causes:
            raise self._explain_causes()
        if ended.code == 0 and self.has_summary:
            return 0
        last = "\n".join(f"    {line}" for line in self._untagged)
        told = ""
        if self.consequences:
            ranks = describe_ranks(sorted({event.rank for event in self.consequences}))
            told = f"; {ranks} only noticed: {self.consequences[0].fields['message']}"
        if self.killed:
            raise LaunchError(
                f"{self.killed[0]}, before it could say why{told}",
                hint=f"out of memory (see dmesg), or killed by somebody; see {self.log.name}",
            )
        raise LaunchError(
            f"the launcher ended with code {ended.code} and no rank said why{told}"
            + (f"; its last words:\n{last}" if last else ""),
            hint=f"a rank was killed, or the machine ran out of memory; see {self.log.name}",
        )

    def _explain_causes(self) -> LaunchError:
        first = self.causes[0].fields
        same = [event for event in self.causes if event.fields["message"] == first["message"]]
        hosts = sorted({event.fields["host"] for event in same})
        ranks = describe_ranks(sorted({event.rank for event in same}))
        message = f"{ranks} on {', '.join(hosts)}: {first['message']}"
        if first["traceback"]:
            message = f"{first['traceback'].rstrip()}\n{message}"
        return _with_code(LaunchError(message), first["exit_code"])


def _with_code(error: LaunchError, code: int) -> LaunchError:
    error.exit_code = code
    return error


# What TensorFlow tells on every rank before it can be told to be quiet.
CHATTER = re.compile(r"before absl::InitializeLog|port\.cc:\d+\] oneDNN custom operations")

# What mpirun, and horovodrun with Gloo, say of a rank that was killed.
_MPIRUN_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_GLOO_KILLED = re.compile(r"Process name: (\d+)\s+Exit code: -?(\d+)")


def _killed_rank(text: str) -> str:
    """Return which rank was killed, from a launcher's own words; empty when they do not say.

    >>> _killed_rank("mpirun noticed that process rank 1 with PID 7 on node n4 exited on signal 9 (Killed).")
    'rank 1 on n4 was killed by signal 9'
    """
    if found := _MPIRUN_KILLED.search(text):
        return f"rank {found[1]} on {found[2]} was killed by signal {found[3]}"
    if (found := _GLOO_KILLED.search(text)) and int(found[2]) > 1:
        number = int(found[2])
        return f"rank {found[1]} was killed by signal {number - 128 if number > 128 else number}"
    return ""
