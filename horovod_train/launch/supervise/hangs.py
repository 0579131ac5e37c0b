"""Reports about hangs: which ranks hang, where they are, and what all ranks do.

ranks are missing from a collective,      Hangs asks the agents of all hosts,
are frozen, or wait too long for data  -> names the ranks in one sentence, and writes hang-N.txt
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ValidationError

from horovod_train.errors import describe_ranks, result_of
from horovod_train.events.types import Hang, Notice, Progress, Started, Summary
from horovod_train.events.wire import Line
from horovod_train.launch.hosts.agent import ProcessState
from horovod_train.launch.hosts.host_group import HostGroup
from horovod_train.launch.hosts.staging import Mask
from horovod_train.launch.supervise.follow import Follower, Stalls
from horovod_train.system.files import write_atomic
from horovod_train.system.stacks import Frame, Stack, parsed

log = logging.getLogger(__name__)

MAX_NAMED = 3
MAX_REPORTS = 10
MAX_CLOSE_S = 5.0
STATES = {"stopped": "is stopped (SIGSTOP)", "tracing-stop": "is held by a debugger"}
LIBRARIES = re.compile(
    rf"<|{re.escape(str(Path(__file__).parents[2]))}/|.*/(site|dist)-packages/|.*/lib/python3(\.\d+)?/"
)


class Answer(BaseModel):
    """What a rank says about itself; see ``health/watches.py`` and ``worker.py``.

    Attributes:
        step: Number of steps that are done; None: training has not begun.
        step_s: Time since the last of them ended.
        stacks: Its threads.
        collective: Collective in which it waits; empty: none.
        collective_s: Time since it waits.
        device: Phase of the step for whose end on the device it waits; empty: none.
        device_s: Time since it waits.
        data: File for which it waits; empty: unknown.
        data_s: Time since it waits for data; None: it does not.
        last: Its last collectives, with the time since each began, and whether it has ended.
        error: Why it could not say all of this.
    """

    step: int | None
    step_s: float
    stacks: list[Stack]
    collective: str = ""
    collective_s: float = 0.0
    device: str = ""
    device_s: float = 0.0
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
        if state in STATES:
            return STATES[state]
        if (awaited := self._awaited()) is not None:
            return f"waits {awaited}"
        kernel = (
            f" (it waits in the kernel, in {self.process.kernel_function})" if state == "disk-sleep" else ""
        )
        innermost = next((frame for stack in self.stacks[:1] for frame in stack.frames), None)
        frame = own_frame(self.stacks[:1]) or innermost
        return f"is in {frame}{kernel}" if frame is not None else f"is {state}{kernel}, and does not answer"

    def _awaited(self) -> str | None:
        """Return for what it waits, as far as it says so."""
        answer = self.answer
        if answer is None:
            return None
        if answer.collective:
            return f"in {answer.collective}"
        if answer.device:
            return f"for {answer.device}"
        if answer.data_s is None:
            return None
        for loader in self.loaders:
            if (frame := own_frame(parsed(loader.stacks)[:1])) is not None:
                return f"for its data: its loader process {loader.pid} is in {frame}"
        return f"for {answer.data}" if answer.data else "for its data" if self.loaders else None

    def since(self) -> str:
        """Return since when, as a part of a sentence; empty: unknown."""
        answer = self.answer
        if answer is None or answer.step is None:
            return ""
        seconds = answer.collective_s or answer.device_s or answer.data_s or answer.step_s
        return f" for {seconds:.0f} s, after step {answer.step}"


def own_frame(stacks: Sequence[Stack]) -> Frame | None:
    """Return the innermost call of the user's code; None: there is none."""
    frames = (frame for stack in stacks for frame in stack.frames)
    return next((frame for frame in frames if not LIBRARIES.match(frame.file)), None)


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


def by_collective(states: Mapping[int, RankState]) -> dict[str, list[int]]:
    """Return the ranks that wait in each collective, as far as it is known."""
    found: dict[str, list[int]] = {}
    for rank, state in states.items():
        if state.collective:
            found.setdefault(state.collective, []).append(rank)
    return found


def absent(states: Mapping[int, RankState], known: Sequence[int], num_ranks: int) -> list[int]:
    """Return the ranks that hang.

    These are the ranks that do not answer, and those that are not in the collective in which most ranks wait,
    so that ranks that enter collectives in another order are named, too. If there are none, they are
    ``known``.
    """
    most = max(by_collective(states).values(), key=len, default=[])
    others = [rank for rank in states if rank not in most] if most else []
    others += [rank for rank in range(num_ranks) if rank not in states]
    return sorted(others or known or states)


def sentence(states: Mapping[int, RankState], missing: Sequence[int]) -> str:
    """Return which ranks hang, what they do, and what the others do."""
    parts = []
    for rank in missing[:MAX_NAMED]:
        state = states.get(rank)
        parts.append(
            f"rank {rank} has not started, or its host does not answer"
            if state is None
            else f"rank {rank} on {state.host} {state.place()}{state.since()}"
        )
    if len(missing) > MAX_NAMED:
        parts.append(f"and {len(missing) - MAX_NAMED} more ranks")
    waiting = by_collective({rank: state for rank, state in states.items() if rank not in missing})
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
            if answer.step is not None:
                yield f"  {answer.step} steps are done, the last one {answer.step_s:.0f} s ago"
            if answer.collective:
                yield f"  waits in {answer.collective} for {answer.collective_s:.0f} s"
            if answer.device:
                yield f"  waits for {answer.device} for {answer.device_s:.0f} s"
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
        num_ranks: Number of ranks of the job.
        show: Called with the event, in a thread; with None when a hang is over.
        mask: Hides secrets.

    Attributes:
        hosts: Hosts of the attempt; None: they are not connected.
        text: The sentence about the current hang; empty: there is none.
    """

    def __init__(
        self,
        stalls: Stalls,
        folder: Path,
        num_ranks: int,
        show: Callable[[Hang | None], None],
        mask: Mask,
    ) -> None:
        self.hosts: HostGroup | None = None
        self.text = ""
        self._stalls, self._folder, self._num_ranks = stalls, folder, num_ranks
        self._show, self._mask = show, mask
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_busy = self._is_over = self._is_closed = False
        self._num_reports = len(list(folder.glob("hang-*.txt")))

    def handle(self, line: Line) -> None:
        """Examine the ranks after a warning of a watchdog of a rank; progress ends a hang."""
        if isinstance(line.event, Notice) and line.event.is_stall:
            self.examine([line.rank] if line.rank is not None else [])
        elif isinstance(line.event, Progress | Started | Summary) and self.text:
            self.forget()
            self._show(None)

    def examine(self, ranks: Sequence[int]) -> None:
        """Examine all ranks, unless it is being done, or was done for this hang. Returns immediately."""
        with self._lock:
            self._is_over = False
            if self._is_busy or self.text or self._is_closed or self.hosts is None:
                return
            self._is_busy = True
            self._thread = threading.Thread(
                target=self._examine, args=(self.hosts, list(ranks)), daemon=True, name="hangs"
            )
            self._thread.start()

    def forget(self) -> None:
        """Note that all ranks go on."""
        with self._lock:
            self._is_over = True
            self.text = self._stalls.diagnosis = ""

    def close(self) -> None:
        """Examine nothing any more, because the ranks have ended. Idempotent."""
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._thread.join(MAX_CLOSE_S)
        self.hosts = None

    def _examine(self, hosts: HostGroup, ranks: Sequence[int]) -> None:
        states, error = result_of(lambda: states_of(hosts.processes_of_ranks()))
        if error is not None:
            log.warning("the ranks could not be examined: %s", error)
        missing = absent(states or {}, sorted(self._stalls.missing) or ranks, self._num_ranks)
        text = self._mask.hide(sentence(states or {}, missing))
        with self._lock:
            self._is_busy = False
            if not states or self._is_over or self._is_closed:
                return
            self.text = text
            self._num_reports += 1
        path = self._folder / f"hang-{self._num_reports}.txt"
        if self._num_reports <= MAX_REPORTS:
            content = "\n".join(map(self._mask.hide, report(states, text).split("\n")))
            _, error = result_of(partial(write_atomic, path, content))
        where = str(path) if error is None and path.exists() else ""
        self._stalls.diagnosis = f"{text}; {where} has what all ranks do" if where else text
        self._show(Hang(text=text, ranks=tuple(missing), report=where))
