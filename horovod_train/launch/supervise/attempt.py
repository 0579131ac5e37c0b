"""One attempt: a single start of a job's ranks, from ssh connections to the outcome.

connect to hosts -> compare them -> choose interfaces -> copy files -> start the command -> read output
-> clean up -> outcome
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Protocol

from horovod_train.config.schema import Health
from horovod_train.errors import LaunchError, LostError
from horovod_train.events.types import Attempt, Event, Hang, HostsLost
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.agent import RUN_VARIABLE
from horovod_train.launch.hosts.host_group import HostGroup, connect_all
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.hosts.staging import Mask, read_secrets, too_short_to_hide, without_secrets
from horovod_train.launch.jobs import LOG_FILE, StateFile
from horovod_train.launch.supervise.follow import (
    Follower,
    Frozen,
    Output,
    RankLogs,
    RunLog,
    ShowOnConsole,
    Stalls,
    TargetFiles,
    fetching_events,
    target_paths,
    watching_ranks,
)
from horovod_train.launch.supervise.hangs import Hangs
from horovod_train.launch.supervise.outcome import Ended, Outcome, stopped_early
from horovod_train.launch.supervise.preflight import prepare
from horovod_train.launch.supervise.signals import (
    LEAVING,
    RunControl,
    adopting_orphans,
    execute,
    guarded,
    interrupted_by_signals,
)
from horovod_train.registry import SCRIPT
from horovod_train.system.files import LogFile

DuringAttempt = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Context that is entered while ranks run; it receives a function that drains them."""


class RankLauncher(Protocol):
    """Interface of launchers whose command runs on this machine, as a child process."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return the plan (command, files, environment) that starts the ranks."""
        ...

    def shell(self, request: LaunchRequest, host: Host) -> list[str]:
        """Return the command prefix that runs a command on a host."""
        ...


def run_attempt(
    launcher: RankLauncher,
    request: LaunchRequest,
    plan: LaunchPlan,
    console: JobConsole,
    state: StateFile,
    during_attempt: DuringAttempt = lambda _: nullcontext(),
    pending_signals: Sequence[int] = (),
    followers: Sequence[Follower] = (),
    record: Callable[[Event], None] = lambda _: None,
) -> None:
    """Start the ranks, supervise them, and return after they have exited.

    Args:
        launcher: Launcher that created the plan.
        request: Job, run and hosts.
        plan: Command and files that start the ranks.
        console: Console that shows the attempt.
        state: State file of the run.
        during_attempt: Context that is entered while the ranks run.
        pending_signals: Signals received before handlers were installed.
        followers: Additional consumers of the output.
        record: Called with events of the attempt (``Attempt``, ``HostsLost``).

    Raises:
        HorovodTrainError: The ranks failed, were preempted or were stopped.
    """
    launch = request.job.launch
    secrets = read_secrets(launch.secrets, os.environ)
    environ = without_secrets(launch.secrets, os.environ)
    plan.write_files()
    with ExitStack() as stack:
        stack.enter_context(adopting_orphans())
        guard = stack.enter_context(guarded(request.stage))
        for name in too_short_to_hide(secrets):
            console.print(f"warning: launch.secrets.{name} is too short to be hidden in logs")
        follow = AttemptOutput(request, plan, console, state, Mask(secrets.values()), followers, record)
        stack.callback(follow.close)
        stopped = partial(stopped_early, attempt=request.attempt)
        with _before_the_start(), interrupted_by_signals(stopped, pending_signals):
            shell = partial(launcher.shell, request)
            hosts = connect_all(request.hosts, shell, request.stage, launch.host_timeout_s)
            stack.callback(hosts.close)
            prepare(hosts, request, environ, secrets, console)
        stack.callback(follow.hangs.close)  # before ``hosts.close``
        record(attempt_of(request))
        control = RunControl(hosts, state, guard, launch.grace_s)
        watch = follow.watching(hosts, request.job.health, control)
        events = fetching_events(hosts, follow.output.handle)
        with control.stopper.listening(), during_attempt(control.stopper.drain), watch, events:
            hosts.watch(launch.host_timeout_s, control.abort_lost_host)
            marked = {**environ, RUN_VARIABLE: request.stage}
            code = execute(plan, marked, follow.output.handle, keep={guard, *hosts.pids})
            ranks = control.examine_hosts(launch.host_timeout_s) if code else {}
    try:
        follow.outcome.check(Ended(code, control.stopper.received, control.lost, control.frozen, ranks))
    except LostError as error:
        if error.hosts:
            record(HostsLost(hosts=tuple(error.hosts), why=error.message))
        raise


@contextmanager
def _before_the_start() -> Iterator[None]:
    try:
        yield
    except LaunchError as error:
        error.was_before_start = True
        raise


def attempt_of(request: LaunchRequest) -> Attempt:
    """Return the ``Attempt`` event of a request."""
    hosts = tuple(host.name for host in request.hosts if not host.is_local)
    num_wanted = request.num_wanted or request.num_ranks
    return Attempt(number=request.attempt, num_ranks=request.num_ranks, num_wanted=num_wanted, hosts=hosts)


class AttemptOutput:
    """Passes the output of an attempt to its consumers, including ``others``; writes the state of the run."""

    def __init__(
        self,
        request: LaunchRequest,
        plan: LaunchPlan,
        console: JobConsole,
        state: StateFile,
        mask: Mask,
        others: Sequence[Follower],
        record: Callable[[Event], None] = lambda _: None,
    ) -> None:
        self._num_ranks = request.num_ranks
        self._console = console
        self._state = state
        self._log = LogFile(request.log_dir / LOG_FILE, self._record_log_error)
        self._record = record
        self.stalls = Stalls(self._report_stall)
        self.hangs = Hangs(self.stalls, request.log_dir, request.num_ranks, self._show_hang, mask)
        self._stalled: dict[str, str] = {}
        launch = request.job.launch
        is_script = request.job.framework == SCRIPT
        self.outcome = Outcome(self.stalls, LOG_FILE, launch.grace_s, request.attempt, is_script=is_script)
        self.output = Output(
            [
                RunLog(self._log),
                RankLogs(request.log_dir, self._record_log_error),
                self.stalls,
                self.hangs,
                TargetFiles(target_paths(request), request.run_id, console.print),
                self.outcome,
                *others,
                ShowOnConsole(console),
            ],
            mask,
            request.num_ranks,
            # The command may be the only rank, and not a program that starts ranks.
            is_of_rank=plan.argv == (request.rank_command,),
        )

    def note(self, text: str) -> None:
        """Write the state ``running`` or ``stopping`` with a warning; an empty text clears the warning."""
        is_leaving = self._state.state == "stopping"
        what = LEAVING if is_leaving else f"{self._num_ranks} rank(s)"
        self._state.write(
            "stopping" if is_leaving else "running", message="; ".join(filter(None, (what, text)))
        )

    def watching(self, hosts: HostGroup, health: Health, control: RunControl) -> AbstractContextManager[None]:
        """Note that ranks run; return a context in which hangs are reported, and frozen ranks ended."""
        self.note("")
        self.hangs.hosts = hosts
        abort = control.abort_frozen_ranks
        return watching_ranks(hosts, health, self.report_frozen, abort, self.report_wait)

    def report_frozen(self, frozen: Sequence[Frozen]) -> None:
        """Report the ranks without heartbeat; if there are none, clear the report."""
        text = "; ".join(map(str, frozen))
        if text:
            self._console.print(f"warning: {text}")
            self._log.write(f"warning: {text}")
            self.hangs.examine([each.rank for each in frozen])
        self._note_hang("frozen", text)

    def report_wait(self, is_long: bool) -> None:  # noqa: FBT001  (the only argument of a callback)
        """Examine the ranks if one has waited too long for others."""
        if is_long:
            self.hangs.examine(())
        self._note_hang("waiting", "a rank waits for others" if is_long else "")

    def _report_stall(self, text: str) -> None:
        if text:
            self.hangs.examine(())
        self._note_hang("stalled", text)

    def _note_hang(self, watch: str, text: str) -> None:
        """Note what a watch reports; an empty text: nothing, any more."""
        self._stalled[watch] = text
        if not any(self._stalled.values()):
            self.hangs.forget()
        self.note(self.hangs.text or "; ".join(filter(None, self._stalled.values())))

    def _show_hang(self, event: Hang | None) -> None:
        if event is None:  # it is over
            self.note("; ".join(filter(None, self._stalled.values())))
            return
        self._console.show(event, 0)
        self._log.write(f"warning: {event.text}; see {event.report}" if event.report else event.text)
        self._record(event)
        self.note(event.text)

    def close(self) -> None:
        """Close logs and console."""
        self.output.close()
        self._log.close()

    def _record_log_error(self, problem: str) -> None:
        self._state.set_warning(problem.partition(" ")[0], problem)
