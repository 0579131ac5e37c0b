"""All hosts of a run: reached, compared, prepared, watched, and cleared up at the end.

This machine takes part directly, every other host through an agent behind ssh.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from threading import Event, Lock, Thread
from time import monotonic
from typing import Protocol, TypeVar, get_type_hints

from pydantic import TypeAdapter

from horovod_train import __version__
from horovod_train.errors import LaunchError, LostError
from horovod_train.launch.hosts.agent import GREETING, HostActions, UnresponsiveRank
from horovod_train.launch.hosts.host_watch import look_at_hosts
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.hosts.ssh import CONNECT_TIMEOUT_S, explain, is_of_another_version, other_version

CALL_TIMEOUT_S = 25.0
LOOK_TIMEOUT_S = 2.0
MAX_AT_ONCE = 32
Result = TypeVar("Result")
Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Reply:
    """What an agent answers.

    Attributes:
        id: Number of the question.
        result: What was done has returned, as JSON.
        error: What went wrong; empty: nothing.
    """

    id: int
    result: object = None
    error: str = ""


def result_of(do: Callable[..., Result], document: object) -> Result:
    """Return what a method of ``HostActions`` has returned, from JSON.

    Raises:
        ValueError: It is something else.
    """
    result: Result = _adapter(do).validate_python(document)
    return result


@cache
def _adapter(do: Callable[..., Result]) -> TypeAdapter[Result]:
    # Created once: each host is polled once a second.
    return TypeAdapter(get_type_hints(do)["return"])


class HostConnection(Protocol):
    """A host that takes part, and how it is spoken to."""

    host: Host

    def call(self, do: Callable[..., Result], /, **args: object) -> Result:
        """Do what a method of ``HostActions`` does, there.

        Raises:
            LaunchError: It failed, or the host does not answer.
        """
        ...

    def submit(self, do: Callable[..., Result], /, **args: object) -> Future[Result]:
        """Begin to do it."""
        ...

    def close(self) -> None:
        """Kill what is left of the run there, and let go."""
        ...


class LocalHost:
    """This machine."""

    def __init__(self, host: Host, stage: str) -> None:
        self.host = host
        self._actions = HostActions(stage)

    def call(self, do: Callable[..., Result], /, **args: object) -> Result:
        """Do it in this process."""
        try:
            return do(self._actions, **args)
        except OSError as error:
            raise LostError(f"{self.host.name}: {do.__name__}: {error}", hosts=[self.host.name]) from error

    def submit(self, do: Callable[..., Result], /, **args: object) -> Future[Result]:
        """Do it in this process."""
        answer: Future[Result] = Future()
        try:
            answer.set_result(self.call(do, **args))
        except LostError as error:
            answer.set_exception(error)
        return answer

    def close(self) -> None:
        """Kill what is left of the run."""
        self._actions.kill()
        self._actions.remove()


class RemoteHost:
    """Another host, behind ssh.

    Args:
        host: Which one.
        shell: What runs a command there, which is its last argument.
        stage: Folder of the run on each host.
        silence_s: The agent takes the launcher for dead after hearing nothing for so long, in seconds.

    Raises:
        LaunchError: It cannot be reached, or has no environment; it says what to do.
    """

    def __init__(self, host: Host, shell: Sequence[str], stage: str, silence_s: float) -> None:
        self.host = host
        self.last_answer_s = monotonic()
        self._lock = Lock()
        self._waiting: dict[int, Callable[[Reply | None], None]] = {}
        self._next = 0
        python = host.settings.python or sys.executable
        self._process = subprocess.Popen(
            [
                *shell,
                f"exec {shlex.quote(python)} -P -m horovod_train.launch.hosts.agent {stage} {silence_s:g}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher to handle
        )
        self._version: Future[str] = Future()
        self._stderr_lines: list[str] = []
        self._threads = [Thread(target=task, daemon=True) for task in (self._read_answers, self._read_errors)]
        for thread in self._threads:
            thread.start()
        try:
            version = self._version.result(CONNECT_TIMEOUT_S + CALL_TIMEOUT_S / 2)
        except (EOFError, FutureTimeoutError) as error:
            self._end()
            output = "".join(self._stderr_lines) or (
                "timed out" if isinstance(error, FutureTimeoutError) else ""
            )
            if is_of_another_version(output):  # so much so that it has no agent where it is looked for
                raise other_version(host.name, _remote_version(shell, python)) from None
            raise explain(host.name, self._process.returncode, output, python) from None
        if version != __version__:
            self._end()
            raise other_version(host.name, version)

    def call(self, do: Callable[..., Result], /, **args: object) -> Result:
        """Do it there."""
        answer = self.submit(do, **args)
        try:
            return answer.result(CALL_TIMEOUT_S)
        except FutureTimeoutError:
            raise LostError(
                f"{self.host.name}: no answer for {CALL_TIMEOUT_S:g} s", hosts=[self.host.name]
            ) from None
        except EOFError:
            raise LostError(
                f"{self.host.name}: the connection ended: {self._last_words()}", hosts=[self.host.name]
            ) from None

    def submit(self, do: Callable[..., Result], /, **args: object) -> Future[Result]:
        """Begin to do it there."""
        answer: Future[Result] = Future()

        def settle(reply: Reply | None) -> None:
            if reply is None:
                answer.set_exception(EOFError())
            elif reply.error:
                answer.set_exception(LostError(f"{self.host.name}: {reply.error}", hosts=[self.host.name]))
            else:
                try:
                    answer.set_result(result_of(do, reply.result))
                except ValueError as error:
                    answer.set_exception(
                        LostError(f"{self.host.name}: {do.__name__}: {error}", hosts=[self.host.name])
                    )

        with self._lock:
            self._next += 1
            self._waiting[self._next] = settle
            line = json.dumps({"id": self._next, "do": do.__name__, "args": args}).encode() + b"\n"
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):
                self._waiting.pop(self._next)(None)
        return answer

    @property
    def is_cut(self) -> bool:
        """Whether the connection has ended."""
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """Process of ssh."""
        return self._process.pid

    def abandon(self) -> None:
        """Wait for it no longer."""
        self._process.kill()

    def close(self) -> None:
        """End the agent; it kills what is left of the run and removes its files first."""
        self._end()

    def _end(self) -> None:
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(5)

    def _last_words(self) -> str:
        lines = "".join(self._stderr_lines).strip().splitlines()
        return lines[-1] if lines else f"ssh ended with code {self._process.poll()}"

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self.last_answer_s = monotonic()
                if not self._version.done():
                    # What a login script prints comes before.
                    text = line.decode(errors="replace")
                    if text.startswith(GREETING):
                        self._version.set_result(text.removeprefix(GREETING).strip())
                    continue
                try:
                    reply = Reply(**json.loads(line))
                    with self._lock:
                        settle = self._waiting.pop(reply.id)
                except (ValueError, TypeError, KeyError):
                    # Something that a login script has left running prints, too: no answer is lost by it.
                    self._stderr_lines = [*self._stderr_lines[-20:], line.decode(errors="replace")]
                    continue
                settle(reply)
        if not self._version.done():
            self._process.wait()
            self._version.set_exception(EOFError())
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for settle in waiting.values():
            settle(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in stream:
                self._stderr_lines = [*self._stderr_lines[-20:], line.decode(errors="replace")]


def _remote_version(shell: Sequence[str], python: str) -> str:
    """Return the version of this package behind a shell; empty: it does not say."""
    code = "import horovod_train; print(horovod_train.__version__)"
    try:
        done = subprocess.run(
            [*shell, f"exec {shlex.quote(python)} -P -c {shlex.quote(code)}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CONNECT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().rpartition("\n")[2]


class HostGroup:
    """The hosts of a run.

    Args:
        connections: One for each host.
    """

    def __init__(self, connections: Sequence[HostConnection]) -> None:
        self.connections = connections
        self._closing = Event()
        self._watch: Thread | None = None

    def each(
        self, do: Callable[..., Result], args: Callable[[HostConnection], Mapping[str, object]] = lambda _: {}
    ) -> dict[str, Result]:
        """Do the same on all hosts at once; return each host's result by its name.

        Raises:
            LaunchError: It failed on a host.
        """
        results = _all_at_once(lambda connection: connection.call(do, **args(connection)), self.connections)
        return {
            connection.host.name: result for connection, result in zip(self.connections, results, strict=True)
        }

    def silent(self, timeout_s: float) -> str:
        """Return the name of a host that does not answer now; empty: all do."""
        others = [connection for connection in self.connections if isinstance(connection, RemoteHost)]
        deadline_s = monotonic() + timeout_s
        for connection, answer in [
            (connection, connection.submit(HostActions.ping)) for connection in others
        ]:
            try:
                answer.result(max(0.0, deadline_s - monotonic()))
            except (EOFError, FutureTimeoutError):
                connection.abandon()
                return connection.host.name
        return ""

    def watch(self, timeout_s: float, on_lost: Callable[[str, str], None]) -> None:
        """Call ``on_lost(host, why)`` once when a host stops answering; until the group is closed."""
        others = [connection for connection in self.connections if isinstance(connection, RemoteHost)]

        if others:
            look = partial(look_at_hosts, others, timeout_s, on_lost, self._closing)
            self._watch = Thread(target=look, daemon=True)
            self._watch.start()

    def unresponsive_ranks(self, limit_s: float) -> dict[str, list[UnresponsiveRank]]:
        """Return what ``HostActions.unresponsive_ranks`` says on each host that answers soon, by its name."""
        return self._of_each(HostActions.unresponsive_ranks, limit_s=limit_s)

    def new_events(self) -> list[str]:
        """Return what ``HostActions.new_events`` says on all hosts that answer soon."""
        return [line for lines in self._of_each(HostActions.new_events).values() for line in lines]

    def _of_each(self, do: Callable[..., Result], /, **args: object) -> dict[str, Result]:
        found = {}
        answers = [(connection, connection.submit(do, **args)) for connection in self.connections]
        for connection, answer in answers:
            # A host that does not answer is another matter: see ``watch``.
            with suppress(EOFError, FutureTimeoutError, LaunchError):
                found[connection.host.name] = answer.result(LOOK_TIMEOUT_S)
        return found

    @property
    def pids(self) -> set[int]:
        """Processes of this machine that hold the connections to the others."""
        return {connection.pid for connection in self.connections if isinstance(connection, RemoteHost)}

    def signal_ranks(self, number: int) -> int:
        """Send a signal to all ranks that can be reached; returns how many."""
        return sum(self._as_far_as_possible(HostActions.signal_ranks, number=number))

    def kill(self) -> None:
        """Kill all processes of the run on all hosts that can be reached."""
        self._as_far_as_possible(HostActions.kill)

    def close(self) -> None:
        """Kill what is left, remove the run's files, let go of all hosts. Safe to call twice."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join()
        _all_at_once(lambda connection: connection.close(), self.connections)
        self.connections = []

    def _as_far_as_possible(self, do: Callable[..., int], /, **args: object) -> list[int]:
        def attempt(connection: HostConnection) -> int:
            with suppress(LaunchError):
                return connection.call(do, **args)
            return 0

        return _all_at_once(attempt, self.connections)


def reach_all(
    hosts: Sequence[Host], shell: Callable[[Host], Sequence[str]], stage: str, silence_s: float
) -> list[HostConnection | LostError]:
    """Reach all hosts at once, each through its shell; return for each its connection, or why not."""

    def reach(host: Host) -> HostConnection | LostError:
        try:
            return (
                LocalHost(host, stage) if host.is_local else RemoteHost(host, shell(host), stage, silence_s)
            )
        except LostError as error:
            return error

    return _all_at_once(reach, hosts)


def connect_all(
    hosts: Sequence[Host], shell: Callable[[Host], Sequence[str]], stage: str, silence_s: float
) -> HostGroup:
    """Reach all hosts at once, each through its shell.

    Raises:
        LaunchError: Some cannot be reached; it names each with what to do.
    """
    found = reach_all(hosts, shell, stage, silence_s)
    failed = [result for result in found if isinstance(result, LostError)]
    group = HostGroup([result for result in found if not isinstance(result, LostError)])
    if failed:
        group.close()
        raise (
            failed[0]
            if len(failed) == 1
            else LostError(
                f"{len(failed)} hosts cannot be used:\n" + "\n".join(f"  {error}" for error in failed),
                hosts=[name for error in failed for name in error.hosts],
            )
        )
    return group


def _all_at_once(do: Callable[[Subject], Result], subjects: Iterable[Subject]) -> list[Result]:
    everything = list(subjects)
    if len(everything) <= 1:
        return [do(subject) for subject in everything]
    with ThreadPoolExecutor(min(MAX_AT_ONCE, len(everything))) as pool:
        return list(pool.map(do, everything))
