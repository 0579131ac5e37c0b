"""Stacks of a process, for reports about hangs.

dump_on_signal       lets another process ask for the stacks of this one, also while a library holds the GIL
threads_of_process   stacks of this process
parsed               stacks from the text of faulthandler
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_FRAMES = 40


class Frame(NamedTuple):
    """A function call."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function}(), line {self.line} of {self.file}"


class Stack(NamedTuple):
    """The calls of a thread, the innermost first."""

    thread: str
    frames: Sequence[Frame]


REQUEST_FILE = "state-request"
"""An agent writes to this file to request a description of their state from the ranks of its host."""
DUMP_SIGNAL = signal.SIGRTMIN + 7
"""MPI libraries and batch systems use other signals."""


def answer_file(rank: int, pid: int) -> str:
    """Return the name of the file in which a rank says what it does.

    >>> answer_file(3, 4711)
    'doing-3-4711'
    """
    return f"doing-{rank}-{pid}"


def dump_file(rank: int, pid: int) -> str:
    """Return the name of the file to which a process of a rank writes its stacks.

    >>> dump_file(3, 4711)
    'stacks-3-4711'
    """
    return f"stacks-{rank}-{pid}"


def dump_on_signal(folder: Path, rank: int) -> None:
    """Let DUMP_SIGNAL append the stacks of all threads of this process to a file in the run's folder.

    The handler needs no GIL. If the file cannot be created, the signal is not handled, and no agent sends it.
    """
    try:
        file = (folder / dump_file(rank, os.getpid())).open("ab")
    except OSError:
        return
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)  # it keeps the file open


def threads_of_process() -> list[Stack]:
    """Return the stacks of all Python threads of this process, but of the calling one; the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)  # noqa: SLF001  (documented)
    stacks = []
    for ident, innermost in frames:
        calls: list[Frame] = []
        frame = innermost
        while frame is not None and len(calls) < MAX_FRAMES:
            name = frame.f_code.co_filename.encode(errors="replace").decode()
            calls.append(Frame(name, frame.f_lineno or 0, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]
        if ident != own:
            stacks.append(Stack(names.get(ident, f"thread {ident}"), calls))
    return stacks


_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def parsed(text: str) -> list[Stack]:
    """Return the stacks that faulthandler has written last; it writes the main thread last."""
    stacks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            stacks.append((f"thread {thread[1]}", []))
        elif (found := _FRAME.match(line)) and stacks:
            number = int(found[2]) if found[2].isdecimal() else 0
            stacks[-1][1].append(Frame(found[1], number, found[3]))
    return [Stack(*each) for each in reversed(stacks)]
