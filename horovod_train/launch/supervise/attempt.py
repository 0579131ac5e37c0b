"""One start of a job's ranks, from reaching the hosts to the verdict.

reach hosts -> compare them -> choose interfaces -> lay out files -> start the command -> follow
-> clear up -> verdict
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Protocol

from horovod_train.events import Event
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.host_actions import RUN_VARIABLE
from horovod_train.launch.hosts.host_group import connect_all
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.hosts.secrets import Mask, read_secrets, too_short_to_hide, without_secrets
from horovod_train.launch.jobs import LOG_FILE, StateFile
from horovod_train.launch.logs import LogFile
from horovod_train.launch.supervise.follow import Ended, Watcher, stopped_early
from horovod_train.launch.supervise.frozen_ranks import Frozen, watching_ranks
from horovod_train.launch.supervise.preflight import prepare
from horovod_train.launch.supervise.process import adopting_orphans, execute, guarded, kill_descendants
from horovod_train.launch.supervise.signals import Stopper, interrupted_by_signals

AlongsideRanks = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""What goes on alongside the ranks; it gets a function that asks them to save and leave."""


class RankLauncher(Protocol):
    """A launcher whose command runs here."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Return what would start the ranks."""
        ...

    def shell(self, request: LaunchRequest, host: Host) -> list[str]:
        """Return what runs a command, its last argument, on a host."""
        ...


def run_attempt(
    launcher: RankLauncher,
    request: LaunchRequest,
    plan: LaunchPlan,
    console: JobConsole,
    state: StateFile,
    alongside: AlongsideRanks = lambda _: nullcontext(),
    asked: Sequence[int] = (),
) -> list[Event]:
    """Start the ranks and stay with them to their end; return what they have measured, if anything.

    Args:
        launcher: Whose command it is.
        request: What to start.
        plan: How.
        console: Where to show it.
        state: Where to note how it stands.
        alongside: What goes on while the ranks run.
        asked: Signals that came before.

    Raises:
        HorovodTrainError: Anything but a good end, explained.
    """
    launch = request.job.launch
    secrets = read_secrets(launch.secrets, os.environ)
    environ = without_secrets(launch.secrets, os.environ)
    plan.write_files()
    lost: list[tuple[str, str]] = []
    frozen: list[Frozen] = []
    with ExitStack() as stack:
        stack.enter_context(adopting_orphans())
        guard = stack.enter_context(guarded(request.stage))
        mask = Mask(secrets.values())
        for name in too_short_to_hide(secrets):
            console.print(f"warning: launch.secrets.{name} is too short to be hidden in logs")
        ranks = f"{request.num_ranks} rank(s)"

        def note(text: str) -> None:
            state.write("running", message="; ".join(filter(None, (ranks, text))))

        def lose(problem: str) -> None:
            state.remark(problem.partition(" ")[0], problem)

        log = LogFile(request.log_dir / LOG_FILE, lose)
        stack.callback(log.close)
        watcher = Watcher(request, console, log, mask, note=note, on_log_loss=lose)
        stack.callback(watcher.close)
        stack.callback(console.close)
        with interrupted_by_signals(lambda number: stopped_early(number, request.attempt), asked):
            shell = partial(launcher.shell, request)
            hosts = connect_all(request.hosts, shell, request.stage, launch.host_timeout_s)
            stack.callback(hosts.close)
            prepare(hosts, request, environ, secrets, console)

        def kill() -> None:
            hosts.kill()
            kill_descendants(keep={guard, *hosts.pids})

        def ask() -> None:
            state.write("leaving", message="its ranks were asked to save and leave after their step")
            hosts.signal_ranks(signal.SIGUSR1)

        def on_lost(host: str, why: str) -> None:
            lost.append((host, why))
            stopper.stop()

        def give_up(ranks: Sequence[Frozen]) -> None:
            frozen.extend(ranks)
            stopper.stop()

        stopper = Stopper(ask, kill, launch.grace_s)
        watch = watching_ranks(hosts, request.job.health, watcher.see_frozen, give_up)
        with stopper.listening(), alongside(stopper.drain), watch:
            note("")
            hosts.watch(launch.host_timeout_s, on_lost)
            marked = {**environ, RUN_VARIABLE: request.stage}
            code = execute(plan, marked, watcher.see, keep={guard, *hosts.pids})
            if code and not lost and not frozen and (host := hosts.silent(launch.host_timeout_s)):
                lost.append((host, "it is silent"))
    watcher.verdict(Ended(code, stopper.received, lost[0] if lost else None, frozen))
    return watcher.measured
