"""Jobs whose ranks start again from a checkpoint: after failures, and when hosts are lost or added.

    wait for hosts -> start ranks -> done
          ^                |
          +----------------+ a failure: resume from the newest checkpoint
          +----------------+ a host was added to or removed from the list: save, exit, start again

The number of ranks never changes while ranks run. Horovod's own elastic mode changes it in process: it
hangs when a host leaves gracefully and too few remain (Horovod issue 3494), loses and repeats samples
(3143, 3399), and unpickles data from the network (CVE-2024-10190).

    run_again              runs attempts until training has ended
    Membership             hosts that the job can use: listed, reachable over ssh, and not in cooldown after
                           a failure
    discover, answering    hosts that a command lists, and those that accept ssh connections
"""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from horovod_train.events.wire import as_text
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.host_group import ssh_config
from horovod_train.launch.hosts.hostlist import interface_towards, own_names, parse_hosts
from horovod_train.launch.jobs import LOG_FILE, StateFile
from horovod_train.launch.supervise.attempt import RankLauncher, run_attempt
from horovod_train.launch.supervise.follow import Follower
from horovod_train.launch.supervise.outcome import stopped_between
from horovod_train.launch.supervise.restarts import RestartPolicy
from horovod_train.launch.supervise.signals import interrupted_by_signals
from horovod_train.system.files import LogFile

PROBE_CONNECT_S = 3
PROBE_TIMEOUT_S = 8.0
DISCOVER_TIMEOUT_S = 10.0
MAX_COUNTED_LOSSES = 4
RESTARTS_FILE = "restarts.json"
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
        self._excluded: set[str] = set()
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
            self._report(f"{name} is excluded for {pause_s:g} s")

    def exclude(self, failed: Mapping[str, Sequence[str]]) -> None:
        """Never use hosts again, because of the failures named, unless too few would be left."""
        for name in sorted(failed.keys() - self._excluded):
            left = [each for each in self._launch.hosts if name_of(each) not in {name, *self._excluded}]
            if self._elastic.discover is None and sum(map(slots_of, left)) < self._elastic.min_ranks:
                self._report(f"{name} has failed {len(failed[name])} times, and there is no spare host")
                continue
            self._excluded.add(name)
            self._report(f"{name} is not used any more: {'; '.join(failed[name])}")

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
        """Return the listed hosts but excluded ones, or no hosts and the error of the discovery command."""
        if self._elastic.discover is None:
            return self._not_excluded(self._launch.hosts), ""
        try:
            return self._not_excluded(discover(self._elastic.discover, self._elastic.ranks_per_host)), ""
        except LaunchError as error:
            return [], error.message

    def _not_excluded(self, entries: Sequence[str]) -> list[str]:
        return [entry for entry in entries if name_of(entry) not in self._excluded]

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


def run_again(
    launcher: RankLauncher,
    request: LaunchRequest,
    console: JobConsole,
    state: StateFile,
    pending_signals: Sequence[int],
    followers: Sequence[Follower] = (),
    record: Callable[[Event], None] = lambda _: None,
) -> None:
    """Run attempts on the available hosts until training has ended.

    Args:
        launcher: Launcher whose command starts the ranks.
        request: Request of a job with ``launch.elastic`` or ``launch.restarts``.
        console: Console that shows the run.
        state: State file of the run.
        pending_signals: Signals received before handlers were installed.
        followers: Additional consumers of the output.
        record: Called with events of the attempts.

    Raises:
        HorovodTrainError: The ranks failed, were preempted or were stopped; there were too few hosts for
            ``wait_s``; or there were too many failures.
    """
    log = LogFile(request.log_dir / LOG_FILE)

    def report(text: str) -> None:
        console.print(text)
        log.write(text)
        log.close()  # the next call opens it again; attempts write the output of ranks to the same file

    launch = request.job.launch
    membership = Membership(request, launch.elastic or Elastic(min_ranks=launch.most_ranks), report)
    recovery = Recovery(request, membership, report, record)
    for number in count():
        with interrupted_by_signals(stopped_between, pending_signals):
            hosts = membership.wait(lambda text: state.write("starting", message=f"waits for hosts: {text}"))
        attempt = on_hosts(request, hosts, number)
        if launch.elastic is not None:
            report(f"elastic: {attempt.num_ranks} ranks on {', '.join(host.name for host in attempt.hosts)}")
        during_attempt = partial(membership.watching, attempt)
        plan = launcher.plan(attempt)
        try:
            run_attempt(
                launcher, attempt, plan, console, state, during_attempt, pending_signals, followers, record
            )
        except PreemptedError as error:
            # A signal to the launcher ends the job. After a preempted rank, or a change of the host list, an
            # elastic job resumes.
            if error.stopped_by is not None or launch.elastic is None:
                raise
            recovery.num_losses = 0
            membership.forget_losses()
        except LaunchError as error:
            pause_s, text = recovery.after(error, attempt)
            state.write("starting", message=text)
            with interrupted_by_signals(partial(stopped_between, failure=error.message), pending_signals):
                sleep(pause_s)
        else:
            return


class Recovery:
    """Prepares the next attempt after a failure.

    Attributes:
        num_losses: Number of losses of an elastic job in a row, without a new checkpoint.
    """

    def __init__(
        self, request: LaunchRequest, membership: Membership, report: Report, record: Callable[[Event], None]
    ) -> None:
        launch = request.job.launch
        self._elastic, self._policy = launch.elastic, None
        if launch.restarts is not None:
            self._policy = RestartPolicy(launch.restarts, request.log_dir / RESTARTS_FILE)
        self._membership, self._report, self._record = membership, report, record
        self.num_losses = 0

    def after(self, error: LaunchError, attempt: LaunchRequest) -> tuple[float, str]:
        """Exclude failed hosts; return the pause before the next attempt, in seconds, and a text about it.

        Raises:
            LaunchError: There is no next attempt.
        """
        if error.was_stopped:
            raise error
        if self._policy is None:
            return 0.0, self._after_loss(error)
        # What happens on all hosts, such as a shared disk that hangs, is not the fault of a host.
        hosts = [] if set(error.hosts) >= {host.name for host in attempt.hosts} else error.hosts
        event = self._policy.after(error, hosts)
        text = as_text(event, 0) or ""
        self._record(event)
        self._report(f"{error}\n{text}")
        self._membership.mark_lost(hosts)
        self._membership.exclude(self._policy.failed_hosts())
        return event.pause_s, text

    def _after_loss(self, error: LaunchError) -> str:
        if not isinstance(error, LostError) or self._elastic is None:
            raise error
        self.num_losses = 0 if error.has_saved else self.num_losses + 1
        if self.num_losses > self._elastic.max_failures:
            raise _gave_up(error, self.num_losses) from error
        if error.has_saved:
            self._membership.forget_losses()
        self._report(f"elastic: {error}")
        self._membership.mark_lost(error.hosts)
        self._report(
            f"elastic: resuming from the newest checkpoint ({self.num_losses} consecutive losses without a "
            "new checkpoint)"
        )
        return "a host or a rank was lost"


def on_hosts(request: LaunchRequest, hosts: Sequence[str], number: int) -> LaunchRequest:
    """Return the request of attempt ``number`` on hosts (``host:slots``); no hosts: on this machine."""
    launch = request.job.launch
    hosts = _needed(hosts, launch.most_ranks)
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


def _needed(hosts: Sequence[str], num_ranks: int) -> list[str]:
    """Return the first hosts that together have enough slots; the others are spares."""
    used: list[str] = []
    for entry in hosts:
        if sum(map(slots_of, used)) >= num_ranks:
            break
        used.append(entry)
    return used


def _gave_up(error: LostError, failures: int) -> LostError:
    return LostError(
        f"{error.message}\n  that was loss {failures} in a row without a new checkpoint",
        hint=f"{error.hint}; launch.elastic.max_failures is {failures - 1}",
        hosts=error.hosts,
    )
