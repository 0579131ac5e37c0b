"""Agent: a process on a remote host, started over ssh, that performs actions for the launcher.

    launcher  -- {"id": 1, "do": "put", "args": {...}} -->  agent
              <-- {"id": 1, "result": ...}             --

Requests and responses are lines of JSON on the ssh connection: no port is opened and nothing is pickled. When
the connection ends, or no request arrives for ``silence_s``, the agent assumes that the launcher is dead, and
kills every process of the run on its host.
"""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from horovod_train.checks.hosts import HostDetails, HostFacts, describe_host, examine_host
from horovod_train.errors import result_of
from horovod_train.events.file import ChannelReader
from horovod_train.horovod.fingerprint import environment_fingerprint, printed_fingerprint
from horovod_train.system.processes import cpu_wait_s, is_alive
from horovod_train.system.stacks import DUMP_SIGNAL, REQUEST_FILE, answer_file, dump_file
from horovod_train.version import __version__

RUN_VARIABLE = "HOROVOD_TRAIN_RUN"
RANK_VARIABLE = "HOROVOD_TRAIN_RANK_PID"
"""RUN_VARIABLE identifies a run's processes by its stage folder; RANK_VARIABLE is the PID of the rank."""

CONNECT_TIMEOUT_S = 4.0
BUSY = 0.2
"""A process that runs, or waits for a CPU, for more than this fraction of the time is not frozen."""


@dataclass(frozen=True)
class UnresponsiveRank:
    """A rank without heartbeat and CPU activity for ``silent_s``; ``doing`` is the state of its process."""

    rank: int
    pid: int
    silent_s: float
    doing: str


@dataclass(frozen=True)
class ProcessState:
    """A process of a rank, for a report about a hang.

    Attributes:
        rank: The rank.
        pid: The process.
        is_loader: It is a loader process of the rank.
        state: State of the process, as psutil names it.
        kernel_function: Function of the kernel in which it waits; empty: none, or not known.
        memory_bytes: Memory that it uses.
        answer: What the rank says (JSON, see ``health/watches.py``); empty: it does not answer.
        stacks: Text of faulthandler; empty: the process has not written any.
    """

    rank: int
    pid: int
    is_loader: bool
    state: str
    kernel_function: str
    memory_bytes: int
    answer: str
    stacks: str


ANSWER_S, DUMP_S = 1.1, 0.3
"""Longest waits for answers of ranks, and for stacks. A rank looks for a request twice a second."""


class HostActions:
    """Actions of the agent on its host; the path ``stage`` identifies the processes and files of the run."""

    def __init__(self, stage: str) -> None:
        self.stage = Path(stage)
        self._listeners: list[socket.socket] = []
        self._is_ours = False
        self._last_busy: dict[int, tuple[float, float]] = {}  # by PID: time when last busy, CPU time then
        self._last_look: dict[int, float] = {}  # by PID: CPU time at the previous call
        self._events = ChannelReader(self.stage)
        self._rank_pids: set[tuple[int, int]] = set()

    # -- queries

    def ping(self) -> bool:
        """Return True, to show that this host responds."""
        return True

    def describe(self, others: Sequence[str]) -> HostFacts:
        """Return paths, addresses and other facts about this host, and its addresses towards ``others``."""
        return describe_host(others)

    def fingerprint(self, task: str | None, script: str = "") -> dict[str, str]:
        """Return versions and digests of the software that ranks on this host would use.

        Args:
            task: Task of the job; None: it is not compared.
            script: Shell script that prints the fingerprint of the container of ranks; empty: none.

        Raises:
            OSError: The container does not start, or its Python does not have this package.
        """
        return printed_fingerprint(script) if script else environment_fingerprint(task)

    def examine(self, folders: Sequence[str], names: Sequence[str], ports: Sequence[int]) -> HostDetails:
        """Return the measurements that ``horovod-train doctor`` checks."""
        return examine_host(folders, names, ports)

    def listen(self, address: str, name: str) -> int:
        """Listen on an address, send a name to each client, and return the port."""
        listener = socket.create_server((address, 0))
        self._listeners.append(listener)

        def answer() -> None:
            with suppress(OSError):
                while True:
                    caller, _ = listener.accept()
                    with caller:
                        caller.sendall(name.encode())

        Thread(target=answer, daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    def reach(self, source: str, targets: Sequence[tuple[str, str, int]]) -> dict[str, str]:
        """Connect from ``source`` to each target (name, address, port); return the errors by name."""
        failed = {}
        for name, address, port in targets:
            try:
                with socket.create_connection((address, port), CONNECT_TIMEOUT_S, (source, 0)) as caller:
                    answered = caller.recv(256).decode(errors="replace")
            except OSError as error:
                failed[name] = str(error.strerror or error)
                continue
            if answered != name:
                failed[name] = (
                    f"{address} leads to {f'host {answered}' if answered else 'another program'} "
                    f"from this host, not to {name}"
                )
        return failed

    def unresponsive_ranks(self, limit_s: float) -> list[UnresponsiveRank]:
        """Return ranks of this host without heartbeat and CPU activity for at least ``limit_s``.

        A rank in a long call that holds the GIL sends no heartbeat, but it uses a CPU or, on an
        oversubscribed host, waits for one.
        """
        now_s = time.monotonic()
        found = []
        for file, rank, pid in self._files_of_processes("alive"):
            # If one file cannot be read or removed, the other ranks are still checked.
            with suppress(OSError, ValueError, psutil.Error):
                self._rank_pids.add((rank, pid))
                if not is_alive(pid):
                    file.unlink()  # the PID may be reused later
                    continue
                process = psutil.Process(pid)
                beat_s = float(file.read_text().split()[0])
                silent_s = now_s - max(beat_s, self._busy_until_s(process, now_s))
                if silent_s >= limit_s:
                    found.append(UnresponsiveRank(rank, pid, silent_s, process.status()))
        return found

    def longest_wait_s(self) -> float:
        """Return for how long a rank of this host has waited in a collective; 0.0: none waits."""
        longest_s = 0.0
        for file, *_ in self._files_of_processes("alive"):
            with suppress(OSError, ValueError):
                beat_s, since_s = map(float, file.read_text().split())
                longest_s = max(longest_s, beat_s - since_s if since_s else 0.0)
        return longest_s

    def rank_pids(self) -> list[tuple[int, int]]:
        """Return rank and PID of each rank that has started on this host."""
        self._rank_pids.update((rank, pid) for _, rank, pid in self._files_of_processes("alive"))
        return sorted(self._rank_pids)

    def processes_of_ranks(self) -> list[ProcessState]:
        """Return what the ranks of this host, and their loader processes, do; takes up to 1.5 s."""
        alive = {process.pid: process for process, _ in self._processes()}
        ranks = {pid: rank for rank, pid in self.rank_pids() if pid in alive}
        dumps = {pid: rank for _, rank, pid in self._files_of_processes("stacks") if pid in alive}
        loaders = {pid: rank for pid, rank in dumps.items() if pid not in ranks}
        request = str(time.monotonic_ns())
        (self.stage / REQUEST_FILE).write_text(request)
        stacks = self._dump(loaders)
        deadline_s = time.monotonic() + ANSWER_S
        answers: dict[int, str] = {}
        while len(answers) < len(ranks) and time.monotonic() < deadline_s:
            time.sleep(0.05)
            for pid, rank in ranks.items():
                with suppress(OSError, ValueError):
                    text = (self.stage / answer_file(rank, pid)).read_text()
                    if json.loads(text)["request"] == request:
                        answers[pid] = text
        stacks |= self._dump(
            {pid: rank for pid, rank in ranks.items() if pid in dumps and pid not in answers}
        )
        found = []
        for pid, rank in sorted((ranks | loaders).items(), key=lambda item: (item[1], item[0] not in ranks)):
            with suppress(psutil.Error):
                process = alive[pid]
                found.append(
                    ProcessState(
                        rank, pid, pid in loaders, process.status(), _kernel_function(pid),
                        process.memory_info().rss, answers.get(pid, ""), stacks.get(pid, ""),
                    )
                )  # fmt: skip
        return found

    def _files_of_processes(self, kind: str) -> Iterator[tuple[Path, int, int]]:
        """Yield the files ``<kind>-<rank>-<pid>`` of the run, with rank and PID."""
        for file in self.stage.glob(f"{kind}-*"):
            with suppress(ValueError):
                rank, pid = map(int, file.name.split("-")[1:])
                yield file, rank, pid

    def _dump(self, processes: Mapping[int, int]) -> dict[int, str]:
        """Let processes (ranks by PID) write their stacks, and return them by PID."""
        files = {pid: self.stage / dump_file(rank, pid) for pid, rank in processes.items()}
        for pid, file in files.items():
            with suppress(OSError, ValueError):
                if _handles(pid, DUMP_SIGNAL):
                    os.truncate(file, 0)
                    os.kill(pid, DUMP_SIGNAL)
        if files:
            time.sleep(DUMP_S)
        return {pid: file.read_text(errors="replace") for pid, file in files.items() if file.exists()}

    def new_events(self) -> list[str]:
        """Return about 1 MiB at most of new events of this host's ranks; later calls return the rest."""
        return self._events.read()

    def _busy_until_s(self, process: psutil.Process, now_s: float) -> float:
        """Return when a process was last busy, estimated from the previous call and this one."""
        times = process.cpu_times()
        busy_s = times.user + times.system + cpu_wait_s(process.pid)
        # Linux counts a CPU wait when it ends. A runnable process with unchanged times is still waiting.
        is_waiting = process.status() == psutil.STATUS_RUNNING and self._last_look.get(process.pid) == busy_s
        self._last_look[process.pid] = busy_s
        last = self._last_busy.get(process.pid)
        if last is None or is_waiting or busy_s - last[1] > BUSY * (now_s - last[0]):
            self._last_busy[process.pid] = last = (now_s, busy_s)
        return last[0]

    # -- files

    def put(self, files: Mapping[str, str], archive: str = "") -> None:
        """Create the stage folder of the run, and write files into it, readable only by this user.

        Args:
            files: Contents by name; a file that starts with ``#!`` is executable.
            archive: Zip file in base64 to unpack into ``code/``; empty: none.

        Raises:
            FileExistsError: The folder exists: it belongs to another run.
        """
        self.stage.mkdir(mode=0o700)
        self._is_ours = True
        for name, content in files.items():
            mode = 0o700 if content.startswith("#!") else 0o600
            handle = os.open(self.stage / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content)
        if archive:
            with zipfile.ZipFile(io.BytesIO(base64.b64decode(archive))) as packed:
                packed.extractall(self.stage / "code")

    def remove(self) -> None:
        """Remove the files that ``put`` wrote, and stop listening."""
        for listener in self._listeners:
            listener.close()
        if self._is_ours:
            shutil.rmtree(self.stage, ignore_errors=True)

    # -- processes

    def signal_ranks(self, number: int) -> int:
        """Send a signal to the ranks, not to their child processes; return the number of ranks."""
        ranks = [process for process, variables in self._processes() if _is_rank(process, variables)]
        for process in ranks:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        return len(ranks)

    def kill(self) -> int:
        """Kill every process of the run on this host; return the number of kills."""
        killed = num_empty_looks = 0
        for _ in range(50):  # processes forked meanwhile are found in the next round
            left = [process for process, _ in self._processes()]
            # Require two empty scans: during exec, the environment of a process cannot be read.
            num_empty_looks = 0 if left else num_empty_looks + 1
            if num_empty_looks == 2:
                break
            killed += len(left)
            for process in left:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.kill()
            # Not psutil.wait_procs: it would reap children whose exit codes other code waits for.
            time.sleep(0.02)
        return killed

    def _processes(self) -> Iterator[tuple[psutil.Process, set[bytes]]]:
        """Yield each process of the run with its initial environment variables."""
        mark = f"{RUN_VARIABLE}={self.stage}".encode()
        for pid in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):
                variables = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
                if mark in variables and is_alive(pid):
                    yield psutil.Process(pid), variables


def _handles(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, whose default action would end it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _kernel_function(pid: int) -> str:
    found, _ = result_of(lambda: Path(f"/proc/{pid}/wchan").read_text())
    return "" if found is None or found == "0" else found


def _is_rank(process: psutil.Process, variables: set[bytes]) -> bool:
    """Return whether a process is a rank, and not a child process of a rank (see ``staging.py``)."""
    return f"{RANK_VARIABLE}={process.pid}".encode() in variables


GREETING = "horovod_train agent"
"""Start of the first line that an agent writes; the version follows."""


def serve(stage: str, silence_s: float) -> None:
    """Perform requests from standard input; when it closes or is silent for ``silence_s``, kill the run."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # batch systems notify all processes of a job
        signal.signal(number, signal.SIG_IGN)
    host = HostActions(stage)
    answers = os.dup(1)
    os.dup2(2, 1)  # output of other code must not mix with the responses
    os.write(answers, f"{GREETING} {__version__}\n".encode())
    try:
        buffer = b""
        while select.select([0], [], [], silence_s)[0]:
            piece = os.read(0, 1 << 20)
            if not piece:
                break
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                _write_all(
                    answers, json.dumps(answer(host, json.loads(line)), default=asdict).encode() + b"\n"
                )
    except BrokenPipeError:
        pass
    finally:
        host.kill()
        host.remove()


def answer(host: HostActions, request: Mapping[str, Any]) -> dict[str, object]:
    """Perform an action, and return its result or its error, which the launcher interprets."""
    try:
        return {"id": request["id"], "result": getattr(host, request["do"])(**request["args"])}
    except Exception as error:  # noqa: BLE001
        return {"id": request["id"], "error": f"{type(error).__name__}: {error}"}


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
