"""Elastic jobs: whenever hosts go or come, ranks start again, from a checkpoint, on the hosts there are.

    wait for hosts -> start ranks -> done
          ^                |
          +----------------+ a host was lost, or a rank was killed: go on from the newest checkpoint
          +----------------+ a host has come, or was taken from the list: save, leave, go on

A world never changes while its ranks run. Horovod's own elastic mode changes it in process: it hangs
when a host leaves in good order and too few stay (issue 3494 there), loses and repeats samples (3143,
3399), and hands pickles to whoever asks (CVE-2024-10190).
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Event, Thread
from time import monotonic, sleep

from horovod_train.config.schema import Elastic, Launch
from horovod_train.errors import LaunchError, LostError, PreemptedError, UserError
from horovod_train.launch.attempt import StartsRanks, carry_out
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts import interface_towards, own_names, parse_hosts
from horovod_train.launch.jobs import StateFile
from horovod_train.launch.ssh import ssh_config
from horovod_train.launch.stop import interrupted_by_signals

PROBE_CONNECT_S = 3
PROBE_TIMEOUT_S = 8.0
DISCOVER_TIMEOUT_S = 10.0
MAX_DOUBLINGS = 7
POLL_S = 0.2


def carry_on(
    launcher: StartsRanks, request: LaunchRequest, elastic: Elastic, console: JobConsole, state: StateFile
) -> None:
    """Train to the end, on whatever hosts there are.

    Raises:
        HorovodTrainError: Anything but a good end, explained; among it, for ``wait_s`` there were too few
            hosts, or ranks were lost ``max_failures`` times in a row without a checkpoint in between.
    """
    members = Members(request, elastic)
    failures = 0
    for number in count():
        state.write("starting", message="waiting for hosts")
        with interrupted_by_signals(_left):
            hosts = members.wait()
        attempt = _on(request, hosts, number)
        where = ", ".join(host.name for host in attempt.hosts)
        console.print(f"elastic: {attempt.num_ranks} ranks on {where}")
        beside = partial(members.watching, attempt, console)
        try:
            carry_out(launcher, attempt, launcher.plan(attempt), console, state, beside)
        except PreemptedError as error:
            # Whoever asks the launcher means the job. Who asks a rank means its host.
            if error.stopped_by is not None:
                raise
            failures = 0
            members.trust(attempt)
        except LostError as error:
            failures = 0 if error.has_saved else failures + 1
            if failures > elastic.max_failures:
                raise
            members.lose(error.hosts)
            console.print(f"elastic: {error}\nelastic: going on from the newest checkpoint")
        else:
            return


def _on(request: LaunchRequest, hosts: Sequence[str], number: int) -> LaunchRequest:
    """Return what is to be started on these hosts."""
    launch = request.job.launch
    if hosts:
        num_ranks = min(sum(map(_slots, hosts)), max_ranks(launch))
        # For the ranks this is a job like any other.
        launch = launch.model_copy(update={"hosts": list(hosts), "num_ranks": num_ranks, "elastic": None})
    job = request.job.model_copy(update={"launch": launch})
    return replace(request, job=job, attempt=number, own_interface=interface_towards(launch))


def max_ranks(launch: Launch) -> int:
    """Return how many ranks an elastic job may have."""
    assert launch.elastic is not None
    return launch.elastic.max_ranks or launch.num_ranks or 1


class Members:
    """Which hosts there are.

    Args:
        request: The job.
        elastic: Its wishes.
    """

    def __init__(self, request: LaunchRequest, elastic: Elastic) -> None:
        self._launch = request.job.launch
        self._ssh = request.ssh
        self._elastic = elastic
        self._max_ranks = max_ranks(self._launch)
        self._not_before_s: dict[str, float] = {}
        self._losses: dict[str, int] = {}
        # ssh is called before the first plan is carried out.
        request.ssh_config.write_text(ssh_config(self._launch.ssh), encoding="utf-8")

    def lose(self, names: Collection[str]) -> None:
        """Leave hosts alone for a while."""
        for name in names:
            # Twice as long each time: a host that answers and then fails would stop the others for ever.
            self._losses[name] = min(self._losses.get(name, 0) + 1, MAX_DOUBLINGS)
            self._not_before_s[name] = monotonic() + self._elastic.cooldown_s * 2 ** (self._losses[name] - 1)

    def trust(self, attempt: LaunchRequest) -> None:
        """Note that the ranks of all these hosts have left in good order."""
        for host in attempt.hosts:
            self._losses.pop(host.name, None)

    def wait(self) -> list[str]:
        """Return the hosts to start on, as ``host:slots``, when there are enough.

        All that are listed and not lost; or, a while later, as many of them as answer. Empty: the job
        names no hosts, and runs here.

        Raises:
            LaunchError: There are too few for too long.
        """
        if not self._launch.hosts and self._elastic.discover is None:
            return []
        started_s = monotonic()
        while True:
            listed, why = self._listed()
            found = self._answering(listed)
            ranks, waited_s = sum(map(_slots, found)), monotonic() - started_s
            is_all = len(found) == len(listed) and ranks > 0
            if ranks >= self._elastic.min_ranks and (
                is_all or ranks >= self._max_ranks or waited_s >= self._elastic.cooldown_s
            ):
                return found
            if waited_s >= self._elastic.wait_s:
                missing = sorted({_name(entry) for entry in listed} - {_name(entry) for entry in found})
                raise LaunchError(
                    f"for {self._elastic.wait_s:g} s there was room for {ranks} ranks only; "
                    f"launch.elastic.min_ranks = {self._elastic.min_ranks}"
                    + (f"; no answer from {', '.join(missing)}" if missing else "")
                    + (f"; {why}" if why else ""),
                    hint="bring hosts back and run the job again: it goes on from its newest checkpoint",
                )
            sleep(min(self._elastic.poll_s, max(POLL_S, self._elastic.wait_s - waited_s)))

    @contextmanager
    def watching(
        self, attempt: LaunchRequest, console: JobConsole, leave: Callable[[], None]
    ) -> Iterator[None]:
        """While the block runs: let the ranks leave when they should go on with other hosts."""
        over = Event()
        looker = Thread(target=self._look, args=(attempt, console, leave, over))
        looker.start()
        try:
            yield
        finally:
            over.set()
            looker.join()

    def _look(
        self, attempt: LaunchRequest, console: JobConsole, leave: Callable[[], None], over: Event
    ) -> None:
        started_s = monotonic()
        if not attempt.job.launch.hosts:
            return
        while not over.wait(self._elastic.poll_s):
            listed, why = self._listed()
            if why:
                continue  # nothing is known, so nothing has changed
            gone = {host.name for host in attempt.hosts} - set(map(_name, listed))
            if gone:
                console.print(f"elastic: {', '.join(sorted(gone))} is to go; saving")
                leave()
                return
            # Not at once: each start costs time.
            if monotonic() - started_s < self._elastic.cooldown_s or attempt.num_ranks >= self._max_ranks:
                continue
            used = {host.name for host in attempt.hosts}
            new = self._answering([entry for entry in listed if _name(entry) not in used], over)
            if new and not over.is_set():
                console.print(f"elastic: {', '.join(map(_name, new))} can take part; saving")
                leave()
                return

    def _listed(self) -> tuple[list[str], str]:
        """Return the hosts that are listed and not left alone; or why that cannot be known."""
        if self._elastic.discover is None:
            entries = self._launch.hosts
        else:
            try:
                entries = discover(self._elastic.discover, self._elastic.ranks_per_host)
            except LaunchError as error:
                return [], error.message
        now_s = monotonic()
        return [entry for entry in entries if self._not_before_s.get(_name(entry), 0.0) <= now_s], ""

    def _answering(self, entries: Sequence[str], over: Event | None = None) -> list[str]:
        return answering(entries, self._ssh, over or Event())


def discover(command: str, ranks_per_host: int) -> list[str]:
    """Return the hosts that a command prints, as ``host:slots``.

    Raises:
        LaunchError: It fails, or prints something else.
    """
    try:
        done = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DISCOVER_TIMEOUT_S,
            check=True,
        )
        listed = parse_hosts(done.stdout, f"the output of {command}", ranks_per_host)
    except (OSError, subprocess.SubprocessError, UserError) as error:
        raise LaunchError(f"launch.elastic.discover: {error}") from error
    return list({_name(entry): entry for entry in listed}.values())


def answering(entries: Sequence[str], ssh: Sequence[str], over: Event) -> list[str]:
    """Return the hosts that let us in, asked all at once.

    A host that is listed may be cut off, or not yet or no longer there: the MPI operator, for one,
    lists pods that run, whether they can be reached or not.
    """
    own = own_names()
    probes = {
        entry: subprocess.Popen(
            [*ssh, "-o", f"ConnectTimeout={PROBE_CONNECT_S}", _name(entry), "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for entry in entries
        if _name(entry) not in own
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


def _left(number: int) -> PreemptedError:
    error = PreemptedError(
        "asked to leave while waiting for hosts",
        hint="run the same job again: it goes on from its newest checkpoint",
    )
    error.stopped_by = number
    return error


def _name(entry: str) -> str:
    return entry.rpartition(":")[0]


def _slots(entry: str) -> int:
    return int(entry.rpartition(":")[2])
