"""Elastic jobs: when hosts are lost or added, ranks restart from a checkpoint on the available hosts.

    wait for hosts -> start ranks -> done
          ^                |
          +----------------+ a host was lost, or a rank was killed: resume from the newest checkpoint
          +----------------+ a host was added to or removed from the list: save, exit, start again

The number of ranks never changes while ranks run. Horovod's own elastic mode changes it in process: it
hangs when a host leaves gracefully and too few remain (Horovod issue 3494), loses and repeats samples
(3143, 3399), and unpickles data from the network (CVE-2024-10190).

    run_elastic            runs attempts until training has ended
    Membership             hosts that the job can use: listed, reachable over ssh, and not in cooldown after
                           a failure
    discover, answering    hosts that a command lists, and those that accept ssh connections
"""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Thread
from time import monotonic, sleep

from horovod_train.config.fields import name_of, slots_of
from horovod_train.config.launch import Elastic
from horovod_train.errors import LaunchError, LostError, PreemptedError, UserError
from horovod_train.events.types import Event
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.host_group import ssh_config
from horovod_train.launch.hosts.hostlist import interface_towards, own_names, parse_hosts
from horovod_train.launch.jobs import LOG_FILE, StateFile
from horovod_train.launch.supervise.attempt import RankLauncher, run_attempt
from horovod_train.launch.supervise.follow import Follower
from horovod_train.launch.supervise.outcome import stopped_between
from horovod_train.launch.supervise.signals import interrupted_by_signals
from horovod_train.system.files import LogFile

PROBE_CONNECT_S = 3
PROBE_TIMEOUT_S = 8.0
DISCOVER_TIMEOUT_S = 10.0
MAX_COUNTED_LOSSES = 4
POLL_S = 0.2

Report = Callable[[str], None]


class Membership:
    """The hosts of an elastic job; ``report`` prints a line and writes it to the log."""

    def __init__(self, request: LaunchRequest, elastic: Elastic, report: Report) -> None:
        self._launch = request.job.launch
        self._ssh = request.remote_shell
        self._elastic = elastic
        self._report = report
        self._not_before_s: dict[str, float] = {}
        self._losses: dict[str, int] = {}
        # Hosts are probed before the first plan writes its files.
        request.ssh_config.write_text(ssh_config(self._launch.ssh), encoding="utf-8")

    def mark_lost(self, names: Collection[str]) -> None:
        """Exclude hosts for a cooldown. It doubles with each loss: a host that answers ssh may still fail."""
        if not self._launch.hosts and self._elastic.discover is None:
            return  # the job uses only this machine
        for name in names:
            losses = self._losses[name] = min(self._losses.get(name, 0) + 1, MAX_COUNTED_LOSSES)
            pause_s = self._elastic.cooldown_s * 2 ** (losses - 1)
            self._not_before_s[name] = monotonic() + pause_s
            self._report(f"elastic: {name} is excluded for {pause_s:g} s")

    def forget_losses(self) -> None:
        """Reset the loss counts of all hosts, which determine their cooldown, after progress."""
        self._losses.clear()

    def wait(self, note: Report) -> list[str]:
        """Block until enough hosts are available, and return them as ``host:slots``.

        Waits for all listed hosts not in cooldown; after waiting ``cooldown_s``, hosts for ``min_ranks`` are
        enough. Returns an empty list if the job lists no hosts, and runs on this machine.

        Args:
            note: Called with the reason for waiting, when the reason changes.

        Raises:
            LaunchError: Too few hosts are available after ``wait_s``.
        """
        if not self._launch.hosts and self._elastic.discover is None:
            return []
        started_s, last_reason = monotonic(), ""
        while True:
            listed, why = self._wanted()
            found = answering(listed, self._ssh, threading.Event())
            ranks, waited_s = sum(map(slots_of, found)), monotonic() - started_s
            is_all = len(found) == len(listed) or ranks >= self._launch.most_ranks
            if ranks >= self._elastic.min_ranks and (is_all or waited_s >= self._elastic.cooldown_s):
                return found
            missing = [name for name in map(name_of, listed) if name not in set(map(name_of, found))]
            silent = f"; no answer from {', '.join(missing)}" if missing else ""
            text = f"room for {ranks} ranks; at least {self._elastic.min_ranks} are required{silent}" + why
            if text != last_reason:
                note(last_reason := text)
            if waited_s >= self._elastic.wait_s:
                raise LaunchError(
                    f"after {self._elastic.wait_s:g} s, there is {text}",
                    hint="add hosts and run the job again: it resumes from its newest checkpoint",
                )
            sleep(min(self._elastic.poll_s, max(POLL_S, self._elastic.wait_s - waited_s)))

    def _wanted(self) -> tuple[list[str], str]:
        """Return the hosts to probe, and the error of the discovery command, if any."""
        everybody, why = self._listed_hosts()
        rested = self._outside_cooldown(everybody)
        # If the other hosts are too few, use those in cooldown, too.
        is_enough = sum(map(slots_of, rested)) >= self._elastic.min_ranks
        return (rested if is_enough else everybody), (f"; {why}" if why else "")

    def _listed_hosts(self) -> tuple[list[str], str]:
        """Return the listed hosts, or no hosts and the error of the discovery command."""
        if self._elastic.discover is None:
            return list(self._launch.hosts), ""
        try:
            return discover(self._elastic.discover, self._elastic.ranks_per_host), ""
        except LaunchError as error:
            return [], error.message

    def _outside_cooldown(self, entries: Sequence[str]) -> list[str]:
        now_s = monotonic()
        return [entry for entry in entries if self._not_before_s.get(name_of(entry), 0.0) <= now_s]

    @contextmanager
    def watching(self, attempt: LaunchRequest, leave: Callable[[], None]) -> Iterator[None]:
        """While the block runs, drain the ranks when a used host is removed, or another host can join."""
        over = threading.Event()
        looker = Thread(target=self._look, args=(attempt, leave, over))
        looker.start()
        try:
            yield
        finally:
            over.set()
            looker.join()

    def _look(self, attempt: LaunchRequest, leave: Callable[[], None], over: threading.Event) -> None:
        used = {host.name for host in attempt.hosts}
        is_full = attempt.num_ranks >= self._launch.most_ranks
        started_s, last_reason = monotonic(), ""
        gone_before: set[str] = set()
        if not attempt.job.launch.hosts:
            return
        while not over.wait(self._elastic.poll_s):
            listed, why = self._listed_hosts()
            if why != last_reason:
                self._report(f"elastic: {why or 'the discovery command works again'}")
                last_reason = why
            if why:
                continue  # discovery failed: keep the current hosts
            gone = used - set(map(name_of, listed))
            # Act only if missing in two polls: the list may be read while it is being written.
            if gone & gone_before:
                self._report(
                    f"elastic: {', '.join(sorted(gone))} was removed from the host list; saving a checkpoint"
                )
                leave()
                return
            gone_before = gone
            # Scale up only after the cooldown: each restart costs time.
            if is_full or monotonic() - started_s < self._elastic.cooldown_s:
                continue
            others = [entry for entry in self._outside_cooldown(listed) if name_of(entry) not in used]
            new = answering(others, self._ssh, over)
            if new and not over.is_set():
                self._report(f"elastic: {', '.join(map(name_of, new))} can join; saving a checkpoint")
                leave()
                return


def discover(command: str, ranks_per_host: int) -> list[str]:
    """Return the hosts that a command prints, without duplicates, as ``host:slots``.

    Raises:
        LaunchError: The command fails, or its output is not a list of hosts.
    """
    try:
        done = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DISCOVER_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise LaunchError(f"launch.elastic.discover: {command}: {reason}")
        listed = parse_hosts(done.stdout, f"the output of {command}", ranks_per_host)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError, UserError) as error:
        raise LaunchError(f"launch.elastic.discover: {error}") from error
    return list({name_of(entry): entry for entry in listed}.values())


def answering(entries: Sequence[str], ssh: Sequence[str], over: threading.Event) -> list[str]:
    """Return the hosts that accept ssh connections, probed in parallel; ``over`` ends the probes early.

    A listed host may be unreachable, not yet started, or already deleted: for example, the MPI operator
    lists running pods, reachable or not.
    """
    own = own_names()
    probes = {
        entry: subprocess.Popen(
            [*ssh, "-o", f"ConnectTimeout={PROBE_CONNECT_S}", name_of(entry), "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for entry in entries
        if name_of(entry) not in own
    }
    deadline_s = monotonic() + PROBE_TIMEOUT_S
    try:
        while any(probe.poll() is None for probe in probes.values()):
            if monotonic() >= deadline_s or over.wait(POLL_S / 4):
                break
    finally:
        for probe in probes.values():
            with suppress(ProcessLookupError):
                probe.kill()
            probe.wait()
    return [entry for entry in entries if entry not in probes or probes[entry].returncode == 0]


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
