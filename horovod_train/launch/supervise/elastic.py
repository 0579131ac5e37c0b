"""Elastic jobs: when hosts are lost or added, ranks restart from a checkpoint on the available hosts.

    wait for hosts -> start ranks -> done
          ^                |
          +----------------+ a host was lost, or a rank was killed: resume from the newest checkpoint
          +----------------+ a host was added to or removed from the list: save, exit, start again

The number of ranks never changes while ranks run. Horovod's own elastic mode changes it in process: it hangs
when a host leaves gracefully and too few remain (Horovod issue 3494), loses and repeats samples (3143, 3399),
and unpickles data from the network (CVE-2024-10190).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from horovod_train.config.fields import name_of, slots_of
from horovod_train.config.launch import Elastic
from horovod_train.errors import LostError, PreemptedError
from horovod_train.events.types import Event
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.hostlist import interface_towards
from horovod_train.launch.jobs import LOG_FILE, StateFile
from horovod_train.launch.supervise.attempt import RankLauncher, run_attempt
from horovod_train.launch.supervise.follow import Follower
from horovod_train.launch.supervise.membership import Membership
from horovod_train.launch.supervise.outcome import stopped_between
from horovod_train.launch.supervise.signals import interrupted_by_signals
from horovod_train.system.files import LogFile


def run_elastic(
    launcher: RankLauncher,
    request: LaunchRequest,
    elastic: Elastic,
    console: JobConsole,
    state: StateFile,
    pending_signals: Sequence[int],
    followers: Sequence[Follower] = (),
    record: Callable[[Event], None] = lambda _: None,
) -> None:
    """Run attempts on the available hosts until training has ended.

    Args:
        launcher: Launcher whose command starts the ranks.
        request: Request of the elastic job.
        elastic: Settings of ``launch.elastic``.
        console: Console that shows the run.
        state: State file of the run.
        pending_signals: Signals received before handlers were installed.
        followers: Additional consumers of the output.
        record: Called with events of the attempts.

    Raises:
        HorovodTrainError: The ranks failed, were preempted or were stopped; there were too few hosts for
            ``wait_s``; or there were more than ``max_failures`` losses in a row without a checkpoint.
    """
    log = LogFile(request.log_dir / LOG_FILE)

    def report(text: str) -> None:
        console.print(text)
        log.write(text)
        log.close()  # the next call opens it again; attempts write the output of ranks to the same file

    membership = Membership(request, elastic, report)
    failures = 0
    for number in count():
        with interrupted_by_signals(stopped_between, pending_signals):
            hosts = membership.wait(lambda text: state.write("starting", message=f"waits for hosts: {text}"))
        attempt = on_hosts(request, hosts, number)
        report(f"elastic: {attempt.num_ranks} ranks on {', '.join(host.name for host in attempt.hosts)}")
        during_attempt = partial(membership.watching, attempt)
        plan = launcher.plan(attempt)
        try:
            run_attempt(
                launcher, attempt, plan, console, state, during_attempt, pending_signals, followers, record
            )
        except PreemptedError as error:
            # A signal to the launcher ends the job. After a preempted rank, or a change of the host list, the
            # job resumes.
            if error.stopped_by is not None:
                raise
            failures = 0
            membership.forget_losses()
        except LostError as error:
            failures = 0 if error.has_saved else failures + 1
            _exclude_lost_hosts(error, failures, elastic, membership, report)
        else:
            return


def on_hosts(request: LaunchRequest, hosts: Sequence[str], number: int) -> LaunchRequest:
    """Return the request of attempt ``number`` on hosts (``host:slots``); no hosts: on this machine."""
    launch = request.job.launch
    names = set(map(name_of, hosts))
    # The ranks receive a job that is not elastic.
    changes = {
        "elastic": None,
        "hosts": list(hosts),
        "num_ranks": min(sum(map(slots_of, hosts)), launch.most_ranks) if hosts else launch.num_ranks,
        "host_settings": {name: found for name, found in launch.host_settings.items() if name in names},
    }
    launch = launch.model_copy(update=changes)
    job = request.job.model_copy(update={"launch": launch})
    wanted = request.job.launch.most_ranks
    return replace(
        request, job=job, attempt=number, own_interface=interface_towards(launch), num_wanted=wanted
    )


def _exclude_lost_hosts(
    error: LostError, failures: int, elastic: Elastic, membership: Membership, report: Callable[[str], None]
) -> None:
    """Exclude lost hosts from the next attempts, for a cooldown.

    Raises:
        LostError: There were more than ``max_failures`` losses in a row.
    """
    if failures > elastic.max_failures:
        raise _gave_up(error, failures) from error
    if error.has_saved:
        membership.forget_losses()
    report(f"elastic: {error}")
    membership.mark_lost(error.hosts)
    report(
        f"elastic: resuming from the newest checkpoint ({failures} consecutive losses without a new "
        "checkpoint)"
    )


def _gave_up(error: LostError, failures: int) -> LostError:
    return LostError(
        f"{error.message}\n  that was loss {failures} in a row without a new checkpoint",
        hint=f"{error.hint}; launch.elastic.max_failures is {failures - 1}",
        hosts=error.hosts,
    )
