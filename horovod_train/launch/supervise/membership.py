"""Hosts that an elastic job can use: listed, reachable over ssh, and not in cooldown after a failure."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic, sleep

from horovod_train.config.fields import name_of, slots_of
from horovod_train.config.launch import Elastic
from horovod_train.errors import LaunchError, UserError
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.hosts.hostlist import own_names, parse_hosts
from horovod_train.launch.hosts.ssh import ssh_config

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
            found = answering(listed, self._ssh, Event())
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
        over = Event()
        looker = Thread(target=self._look, args=(attempt, leave, over))
        looker.start()
        try:
            yield
        finally:
            over.set()
            looker.join()

    def _look(self, attempt: LaunchRequest, leave: Callable[[], None], over: Event) -> None:
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


def answering(entries: Sequence[str], ssh: Sequence[str], over: Event) -> list[str]:
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
