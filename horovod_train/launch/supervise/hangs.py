"""Reports about hangs: which ranks do not go on, where they are, and what all ranks do.

ranks are missing from a collective,      Hangs asks the agents of all hosts,
are frozen, or wait too long for data  -> names the ranks in one sentence, and writes hang-N.txt
"""

from __future__ import annotations

import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ValidationError

from horovod_train.errors import describe_ranks
from horovod_train.events.types import Hang, Notice
from horovod_train.events.wire import Line
from horovod_train.launch.hosts.agent import ProcessState
from horovod_train.launch.hosts.host_group import HostGroup
from horovod_train.launch.supervise.follow import Follower, Stalls
from horovod_train.system.files import write_atomic
from horovod_train.system.stacks import Frame, Stack, parsed

MAX_NAMED = 3
MAX_REPORTS = 10
PACKAGE = str(Path(__file__).parents[2])
LIBRARIES = ("<", PACKAGE, sysconfig.get_path("stdlib"))


class Answer(BaseModel):
    """What a rank says about itself; see ``health/watches.py`` and ``worker.py``.

    Attributes:
        step: Number of steps that are done.
        step_s: Time since the last of them ended.
        stacks: Its threads.
        collective: Collective in which it waits; empty: none.
        collective_s: Time since it waits.
        data: File for which it waits; empty: unknown.
        data_s: Time since it waits for data; None: it does not.
        last: Its last collectives, with the time since each began, and whether it has ended.
        error: Why it could not say all of this.
    """

    step: int
    step_s: float
    stacks: list[Stack]
    collective: str = ""
    collective_s: float = 0.0
    data: str = ""
    data_s: float | None = None
    last: list[tuple[str, float, float | None]] = []
    error: str = ""


@dataclass
class RankState:
    """What a rank does.

    Attributes:
        host: Its host.
        process: Its process.
        answer: What it says; None: nothing.
        loaders: Its loader processes.
    """

    host: str
    process: ProcessState
    answer: Answer | None
    loaders: list[ProcessState] = field(default_factory=list)

    @property
    def stacks(self) -> Sequence[Stack]:
        """Its threads, the main one first."""
        return self.answer.stacks if self.answer is not None else parsed(self.process.stacks)

    @property
    def collective(self) -> str:
        """The collective in which it waits; empty: none is known."""
        return "" if self.answer is None else self.answer.collective

    def place(self) -> str:
        """Return where it is, as a part of a sentence."""
        state = self.process.state
        if state == "stopped":
            return "is stopped (SIGSTOP)"
        if state == "tracing-stop":
            return "is held by a debugger"
        if self.collective:
            return f"waits in {self.collective}"
        if self.answer is not None and self.answer.data_s is not None:
            for loader in self.loaders:
                if (frame := own_frame(parsed(loader.stacks)[:1])) is not None:
                    return f"waits for its data: its loader process {loader.pid} is in {frame}"
            if self.answer.data:
                return f"waits for {self.answer.data}"
        kernel = (
            f" (it waits in the kernel, in {self.process.kernel_function})" if state == "disk-sleep" else ""
        )
        frame = own_frame(self.stacks[:1])
        return f"is in {frame}{kernel}" if frame is not None else f"is {state}{kernel}, and does not answer"

    def since(self) -> str:
        """Return since when, as a part of a sentence; empty: unknown."""
        if self.answer is None:
            return ""
        since_s = self.answer.collective_s if self.collective else self.answer.data_s
        elapsed_s = self.answer.step_s if since_s is None else since_s
        return f" for {elapsed_s:.0f} s, after step {self.answer.step}"


def own_frame(stacks: Sequence[Stack]) -> Frame | None:
    """Return the innermost call of the user's code, or else the innermost one; None: there is no stack."""
    frames = [frame for stack in stacks for frame in stack.frames]
    own = (
        each for each in frames if not each.file.startswith(LIBRARIES) and "/site-packages/" not in each.file
    )
    return next(own, frames[0] if frames else None)


def states_of(hosts: Mapping[str, Sequence[ProcessState]]) -> dict[int, RankState]:
    """Return what each rank does, from the processes of all hosts."""
    found: dict[int, RankState] = {}
    for host, processes in hosts.items():
        for process in processes:
            if not process.is_loader:
                found[process.rank] = RankState(host, process, _answer_of(process))
            elif process.rank in found:  # a rank comes before its loaders
                found[process.rank].loaders.append(process)
    return dict(sorted(found.items()))


def _answer_of(process: ProcessState) -> Answer | None:
    try:
        return Answer.model_validate_json(process.answer) if process.answer else None
    except ValidationError:
        return None


def absent(states: Mapping[int, RankState], known: Sequence[int]) -> list[int]:
    """Return the ranks that do not go on.

    These are the ranks that are not in the collective in which most ranks wait, so that ranks that enter
    collectives in another order are named, too. If no rank waits in a known collective, they are ``known``.
    """
    in_collective: dict[str, list[int]] = {}
    for rank, state in states.items():
        if state.collective:
            in_collective.setdefault(state.collective, []).append(rank)
    most = max(in_collective.values(), key=len, default=[])
    others = [rank for rank in states if rank not in most] if most else []
    others += [rank for rank in known if rank not in states]
    return sorted(others or known or states)


def sentence(states: Mapping[int, RankState], missing: Sequence[int]) -> str:
    """Return which ranks do not go on, what they do, and what the others do."""
    parts = []
    for rank in missing[:MAX_NAMED]:
        state = states.get(rank)
        parts.append(
            f"rank {rank} does not answer"
            if state is None
            else f"rank {rank} on {state.host} {state.place()}{state.since()}"
        )
    if len(missing) > MAX_NAMED:
        parts.append(f"and {len(missing) - MAX_NAMED} more ranks")
    waiting: dict[str, list[int]] = {}
    for rank, state in states.items():
        if state.collective and rank not in missing:
            waiting.setdefault(state.collective, []).append(rank)
    text = "; ".join(parts)
    others = ", ".join(f"{describe_ranks(ranks)} in {where}" for where, ranks in waiting.items())
    return f"{text}; waiting: {others}" if others else text


def report(states: Mapping[int, RankState], text: str) -> str:
    """Return the content of a report."""
    return "\n".join([time.strftime("%Y-%m-%d %H:%M:%S"), text, "", *_lines(states), ""])


def _lines(states: Mapping[int, RankState]) -> Iterator[str]:
    for rank, state in states.items():
        yield _process_line(f"rank {rank} on {state.host}", state.process)
        if (answer := state.answer) is not None:
            yield f"  {answer.step} steps are done, the last one {answer.step_s:.0f} s ago"
            if answer.collective:
                yield f"  waits in {answer.collective} for {answer.collective_s:.0f} s"
            if answer.data_s is not None:
                yield f"  waits for {answer.data or 'data'} for {answer.data_s:.0f} s"
            for name, begun_s, ended_s in answer.last:
                ended = "" if ended_s is not None else ", has not ended"
                yield f"  collective {name}: begun {begun_s:.1f} s ago{ended}"
            if answer.error:
                yield f"  {answer.error}"
        yield from _stack_lines(state.stacks)
        for loader in state.loaders:
            yield _process_line(f"  loader process of rank {rank}", loader)
            yield from _stack_lines(parsed(loader.stacks))
        yield ""


def _process_line(name: str, process: ProcessState) -> str:
    where = f" in {process.kernel_function}" if process.kernel_function else ""
    return f"{name}: process {process.pid}, {process.state}{where}, {process.memory_bytes / 2**20:.0f} MiB"


def _stack_lines(stacks: Sequence[Stack]) -> Iterator[str]:
    for stack in stacks:
        yield f"  {stack.thread}"
        yield from (f"    {frame}" for frame in stack.frames)


class Hangs(Follower):
    """Examines all ranks, once for each hang.

    Args:
        stalls: Ranks that are missing from a collective.
        folder: Folder of the reports.
        show: Called with the event, in a thread.

    Attributes:
        hosts: Hosts of the attempt; None: they are not connected.
        text: The sentence about the current hang; empty: there is none.
    """

    def __init__(self, stalls: Stalls, folder: Path, show: Callable[[Hang], None]) -> None:
        self.hosts: HostGroup | None = None
        self.text = ""
        self._stalls, self._folder, self._show = stalls, folder, show
        self._thread: threading.Thread | None = None
        self._num_reports = len(list(folder.glob("hang-*.txt")))

    def handle(self, line: Line) -> None:
        """Examine the ranks after a warning of a watchdog of a rank."""
        if isinstance(line.event, Notice) and line.event.is_stall:
            self.examine([line.rank] if line.rank is not None else [])

    def examine(self, ranks: Sequence[int]) -> None:
        """Examine all ranks, unless it is being done, or was done for this hang. Returns immediately."""
        if self._thread is not None or self.hosts is None or self._num_reports >= MAX_REPORTS:
            return
        self._thread = threading.Thread(target=self._examine, args=(self.hosts, list(ranks)), daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Note that all ranks go on."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread, self.text = None, ""

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self.hosts = None

    def _examine(self, hosts: HostGroup, ranks: list[int]) -> None:
        states = states_of(hosts.processes_of_ranks())
        missing = absent(states, sorted(self._stalls.missing) or ranks)
        self.text = sentence(states, missing)
        self._num_reports += 1
        path = self._folder / f"hang-{self._num_reports}.txt"
        try:
            write_atomic(path, report(states, self.text))
        except OSError as error:
            self.text += f" (no report: {error.strerror})"
        self._stalls.diagnosis = f"{self.text}; {path} has what all ranks do"
        self._show(Hang(text=self.text, ranks=tuple(missing), report=str(path)))
