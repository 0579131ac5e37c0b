"""Hosts of a run: connections, actions on all hosts, monitoring, and cleanup.

    HostGroup                the hosts of a run, with one connection for each
    LocalHost, RemoteHost    connections to this machine, and to the agent of another host
    reach_all, connect_all   connect to all hosts in parallel
    ping_hosts               detects hosts that stop responding
    ssh_config, explain      the ssh configuration of a run, and explanations of ssh errors

Actions on this machine run in this process. Actions on other hosts run in an agent, over ssh.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
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

from horovod_train.checks.hosts import HostFacts
from horovod_train.config.launch import Ssh
from horovod_train.errors import LaunchError, LostError
from horovod_train.launch.hosts.agent import GREETING, HostActions, ProcessState, UnresponsiveRank
from horovod_train.launch.hosts.hostlist import Chosen, Host
from horovod_train.version import __version__

PING_INTERVAL_S = 2.0


def ping_hosts(
    hosts: Sequence[RemoteHost], timeout_s: float, on_lost: Callable[[str, str], None], over: Event
) -> None:
    """Ping hosts until ``over`` is set, or until one is lost: abandon it, and call ``on_lost(name, reason)``.

    A host is lost when its connection has ended, or after ``timeout_s`` without a response.
    """
    looked_s, stood_still_s = monotonic(), 0.0
    while not over.wait(PING_INTERVAL_S):
        now_s = monotonic()
        if (gap_s := now_s - looked_s - PING_INTERVAL_S) > timeout_s / 2:
            # This process was stopped, and received no responses. Ping all hosts before one counts as lost.
            stood_still_s = gap_s
            for host in hosts:
                host.last_answer_s = now_s
        looked_s = now_s
        for host in hosts:
            silent_s, is_disconnected = monotonic() - host.last_answer_s, host.is_disconnected
            if is_disconnected or silent_s > timeout_s:
                host.abandon()
                on_lost(host.host.name, _why_lost(silent_s, stood_still_s, is_disconnected=is_disconnected))
                return
            host.submit(HostActions.ping)


def _why_lost(silent_s: float, stood_still_s: float, *, is_disconnected: bool) -> str:
    """Return why a host counts as lost; this process was stopped for ``stood_still_s`` before."""
    if not is_disconnected:
        return f"silent for {silent_s:.0f} s"
    if stood_still_s:
        return f"this launcher was stopped for {stood_still_s:.0f} s, and the host has ended its ranks"
    return "its ssh connection ended"


# Without a network, ranks would still listen on all addresses.
_SHARED_MEMORY = {
    "OMPI_MCA_btl": "^openib,tcp",
    "I_MPI_FABRICS": "shm",
    "FI_TCP_IFACE": "lo",
    "UCX_NET_DEVICES": "lo",
}


def transport_variables(facts: HostFacts, interface: Chosen | None) -> dict[str, str]:
    """Return the variables of ranks on one host.

    Args:
        facts: Facts about the host.
        interface: Network interface towards other hosts; None: all ranks are on this host.
    """
    variables = {} if facts.reads_memory else without_reads_of_memory()
    if interface is None:
        return {**_SHARED_MEMORY, **variables}
    variables |= {
        "HOROVOD_GLOO_IFACE": interface.name,
        "NCCL_SOCKET_IFNAME": interface.name,
        "OMPI_MCA_btl_tcp_if_include": interface.name,
        "FI_TCP_IFACE": interface.name,
    }
    if not facts.has_fabric:  # it includes the adapters of a fabric
        variables["UCX_NET_DEVICES"] = interface.name
    return variables


def without_reads_of_memory() -> dict[str, str]:
    """Return variables with which Open MPI 4 and 5 do not read the memory of other processes.

    Otherwise, they would try it with each message, and print an error each time.
    """
    return {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_smsc": "^cma"}


CONNECT_TIMEOUT_S = 10
SSH_FAILED = 255


def ssh_config(ssh: Ssh) -> str:
    """Return an ssh configuration: the options of the job, then the files of the user and of the system.

    A broken connection is detected within 15 seconds. The user's settings apply to the check of host keys.
    """
    ssh_options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT_S),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        **({"Port": str(ssh.port)} if ssh.port is not None else {}),
        **({"User": ssh.user} if ssh.user is not None else {}),
        **({"IdentityFile": ssh.identity_file, "IdentitiesOnly": "yes"} if ssh.identity_file else {}),
    }
    lines = [f"{name} {value}" for name, value in {**ssh_options, **ssh.options}.items()]
    return "\n".join(["Host *", *lines, "Include ~/.ssh/config", "Include /etc/ssh/ssh_config", ""])


def is_of_another_version(stderr: str) -> bool:
    """Return whether an error of Python means that another version of this package is installed."""
    # On the host, the module does not exist, or its parent is a plain module instead of a package.
    return re.search(r"(No module named|not found on) '?horovod_train\.", stderr) is not None


def other_version(host: str, version: str) -> LostError:
    """Return the error for a host that has another version of this package."""
    remote = version or "of another version"
    return LostError(
        f"{host}: horovod_train is {remote} on this host and {__version__} on the launching machine; "
        "the two are "
        "incompatible",
        hint="install the same version on all hosts",
        hosts=[host],
    )


def explain(host: str, code: int, stderr: str, python: str) -> LostError:
    """Return the error for a Python program that could not be started on a host.

    ``code`` is the exit code of ssh: 255 is an error of ssh, other codes are those of the program.
    """
    last = stderr.strip().splitlines()[-1] if stderr.strip() else f"exit code {code}"
    for sign, what, fix in _SSH_MESSAGES if code == SSH_FAILED else _SHELL_MESSAGES:
        if sign in stderr:
            return LostError(
                f"{host}: {what.format(host=host, python=python)} ({last})",
                hint=fix.format(host=host, python=python),
                hosts=[host],
            )
    where = "ssh failed" if code == SSH_FAILED else f"{python} -m horovod_train does not start"
    return LostError(
        f"{host}: {where}: {last}",
        hint=f"try `ssh {host} {python} -m horovod_train --version`",
        hosts=[host],
    )


_KEYS = "ssh-keyscan {host} >> ~/.ssh/known_hosts, after comparing its fingerprint"
_NEW_KEYS = "if the host has a new key: ssh-keygen -R {host}; " + _KEYS
_LET_IN = "ssh-copy-id {host}, or set launch.ssh.identity_file or launch.ssh.user"
_ENVIRONMENT = (
    "install the same environment at the same path there, or say where it is: "
    "launch.host_settings.{host}.python"
)
# Text in the output of ssh, explanation, hint.
_SSH_MESSAGES = (
    ("IDENTIFICATION HAS CHANGED", "its host key is not the one known", _NEW_KEYS),
    ("Host key verification failed", "its host key is not known", _KEYS),
    ("UNPROTECTED PRIVATE KEY", "the key may be read by others, so ssh ignores it", "chmod 600 the key"),
    ("Permission denied", "authentication failed", _LET_IN),
    (
        "Could not resolve hostname",
        "unknown host name",
        "correct it, or add it to DNS or /etc/hosts",
    ),
    ("Connection refused", "nothing listens there", "start sshd, or set launch.ssh.port"),
    ("timed out", "it does not answer", "is it up? is a firewall in the way? `ping {host}`"),
    ("No route to host", "it cannot be reached", "is it up? `ip route get {host}`"),
    ("Network is unreachable", "no route to its network", "`ip route get {host}`"),
)
_SHELL_MESSAGES = (
    ("No module named", "{python} has no horovod_train", _ENVIRONMENT),
    ("not found", "there is no {python}", _ENVIRONMENT),
    ("No such file", "there is no {python}", _ENVIRONMENT),
    ("Permission denied", "{python} may not be executed", _ENVIRONMENT),
)


CALL_TIMEOUT_S = 25.0
LOOK_TIMEOUT_S = 2.0
DIAGNOSIS_TIMEOUT_S = 4.0
MAX_AT_ONCE = 32
Result = TypeVar("Result")
Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Reply:
    """Response of an agent: number of the request, and JSON result of the action or error message."""

    id: int
    result: object = None
    error: str = ""


def result_of(do: Callable[..., Result], document: object) -> Result:
    """Convert the JSON result of a method of ``HostActions`` to its return type.

    Raises:
        ValueError: The document does not have this type.
    """
    result: Result = _adapter(do).validate_python(document)
    return result


@cache
def _adapter(do: Callable[..., Result]) -> TypeAdapter[Result]:
    # Cached, because each host is polled at least once a second.
    return TypeAdapter(get_type_hints(do)["return"])


class HostConnection(Protocol):
    """Connection to a host of a run."""

    host: Host

    def call(self, do: Callable[..., Result], /, **args: object) -> Result:
        """Perform a method of ``HostActions`` on the host, and return its result.

        Raises:
            LaunchError: The action failed, or the host does not respond.
        """
        ...

    def submit(self, do: Callable[..., Result], /, **args: object) -> Future[Result]:
        """Start an action on the host, and return a future of its result."""
        ...

    def close(self) -> None:
        """Kill the remaining processes of the run on the host, remove its files, and disconnect."""
        ...


class LocalHost:
    """Connection to this machine."""

    def __init__(self, host: Host, stage: str) -> None:
        self.host = host
        self._actions = HostActions(stage)

    def call(self, do: Callable[..., Result], /, **args: object) -> Result:
        """Perform an action in this process."""
        try:
            return do(self._actions, **args)
        except OSError as error:
            raise LostError(f"{self.host.name}: {do.__name__}: {error}", hosts=[self.host.name]) from error

    def submit(self, do: Callable[..., Result], /, **args: object) -> Future[Result]:
        """Perform an action in this process, and return a completed future."""
        answer: Future[Result] = Future()
        try:
            answer.set_result(self.call(do, **args))
        except LostError as error:
            answer.set_exception(error)
        return answer

    def close(self) -> None:
        """Kill the remaining processes of the run, and remove its files."""
        self._actions.kill()
        self._actions.remove()


class RemoteHost:
    """Connection to the agent of another host, over ssh.

    Args:
        host: The host.
        shell: Command prefix that runs a command on the host; the command is appended as one argument.
        stage: Folder of the run on each host.
        silence_s: Seconds without a request after which the agent assumes that the launcher is dead.

    Raises:
        LaunchError: The host cannot be reached, or its environment cannot be used; contains a hint.
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
            start_new_session=True,  # Ctrl-C must reach only the launcher
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
            if is_of_another_version(output):  # its agent is missing, or in another module
                raise other_version(host.name, _remote_version(shell, python)) from None
            raise explain(host.name, self._process.returncode, output, python) from None
        if version != __version__:
            self._end()
            raise other_version(host.name, version)

    def call(self, do: Callable[..., Result], /, **args: object) -> Result:
        """Perform an action on the host, and return its result."""
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
        """Send a request to the agent, and return a future of its result."""
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
    def is_disconnected(self) -> bool:
        """Whether the connection has ended."""
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """PID of the ssh process."""
        return self._process.pid

    def abandon(self) -> None:
        """Kill the ssh process, so that pending requests fail."""
        self._process.kill()

    def close(self) -> None:
        """End the agent, which first kills the remaining processes of the run and removes its files."""
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
                    # The output of login scripts precedes the greeting.
                    text = line.decode(errors="replace")
                    if text.startswith(GREETING):
                        self._version.set_result(text.removeprefix(GREETING).strip())
                    continue
                try:
                    reply = Reply(**json.loads(line))
                    with self._lock:
                        settle = self._waiting.pop(reply.id)
                except (ValueError, TypeError, KeyError):
                    # Not a response, but the output of a background process of a login script.
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
    """Return the version of this package on a host; empty: unknown."""
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
    """The hosts of a run, with one connection for each."""

    def __init__(self, connections: Sequence[HostConnection]) -> None:
        self.connections = connections
        self._closing = Event()
        self._watch: Thread | None = None

    def each(
        self, do: Callable[..., Result], args: Callable[[HostConnection], Mapping[str, object]] = lambda _: {}
    ) -> dict[str, Result]:
        """Perform an action on all hosts in parallel, and return the results by host name.

        Raises:
            LaunchError: The action failed on a host.
        """
        results = _all_at_once(lambda connection: connection.call(do, **args(connection)), self.connections)
        return {
            connection.host.name: result for connection, result in zip(self.connections, results, strict=True)
        }

    def silent(self, timeout_s: float) -> str:
        """Return the name of a host that does not respond within ``timeout_s``; empty: all hosts respond."""
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
        """Call ``on_lost(host, why)`` once, when a host stops responding; ends when the group is closed."""
        others = [connection for connection in self.connections if isinstance(connection, RemoteHost)]

        if others:
            look = partial(ping_hosts, others, timeout_s, on_lost, self._closing)
            self._watch = Thread(target=look, daemon=True)
            self._watch.start()

    def unresponsive_ranks(self, limit_s: float) -> dict[str, list[UnresponsiveRank]]:
        """Return the unresponsive ranks of each host that responds in time, by host name."""
        return self._of_each(HostActions.unresponsive_ranks, limit_s=limit_s)

    def longest_wait_s(self) -> float:
        """Return for how long a rank has waited in a collective; 0.0: none waits."""
        return max(self._of_each(HostActions.longest_wait_s).values(), default=0.0)

    def processes_of_ranks(self) -> dict[str, list[ProcessState]]:
        """Return what the ranks of each host that responds in time do, by host name."""
        # At the same moment on all hosts; this machine answers within ``submit``.
        others_first = sorted(self.connections, key=lambda each: isinstance(each, LocalHost))
        answers = [(each, each.submit(HostActions.processes_of_ranks)) for each in others_first]
        found: dict[str, list[ProcessState]] = {}
        deadline_s = monotonic() + DIAGNOSIS_TIMEOUT_S
        for connection, answer in answers:
            with suppress(EOFError, FutureTimeoutError, LaunchError):
                found[connection.host.name] = answer.result(max(0.0, deadline_s - monotonic()))
        return found

    def ranks_by_pid(self) -> dict[int, int]:
        """Return the ranks of all hosts that respond in time by PID, those that have ended included.

        A PID that ranks on several hosts have had is omitted.
        """
        found = [pair for pairs in self._of_each(HostActions.rank_pids).values() for pair in pairs]
        times = Counter(pid for _, pid in found)
        return {pid: rank for rank, pid in found if times[pid] == 1}

    def new_events(self) -> list[str]:
        """Return the new events of all hosts that respond in time."""
        return [line for lines in self._of_each(HostActions.new_events).values() for line in lines]

    def _of_each(self, do: Callable[..., Result], /, **args: object) -> dict[str, Result]:
        found = {}
        answers = [(connection, connection.submit(do, **args)) for connection in self.connections]
        for connection, answer in answers:
            # ``watch`` reports hosts that do not respond.
            with suppress(EOFError, FutureTimeoutError, LaunchError):
                found[connection.host.name] = answer.result(LOOK_TIMEOUT_S)
        return found

    @property
    def pids(self) -> set[int]:
        """PIDs of the ssh processes on this machine."""
        return {connection.pid for connection in self.connections if isinstance(connection, RemoteHost)}

    def signal_ranks(self, number: int) -> int:
        """Send a signal to the ranks of all hosts that can be reached, and return their number."""
        return sum(self._as_far_as_possible(HostActions.signal_ranks, number=number))

    def kill(self) -> None:
        """Kill all processes of the run on all hosts that can be reached."""
        self._as_far_as_possible(HostActions.kill)

    def close(self) -> None:
        """Kill remaining processes, remove the files of the run, and disconnect. Safe to call twice."""
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
    """Connect to all hosts in parallel; return the connection to each host, or the error."""

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
    """Connect to all hosts in parallel.

    Raises:
        LaunchError: Hosts cannot be reached; contains the error and the hint for each.
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
