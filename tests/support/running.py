"""A job that is going on, to be disturbed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from horovod_train.horovod.mpi import number_of
from support.launching import BIN, PROGRAMS, TIMEOUT_S, environment


def as_it_is(*command: str) -> list[str]:
    return list(command)


def launched(
    folder: Path,
    path: Path,
    through: Callable[..., list[str]] = as_it_is,
    env: Mapping[str, str] | None = None,
    programs: Path = BIN,
) -> subprocess.Popen[str]:
    """`horovod-train run`, started; standard error is part of its output."""
    return subprocess.Popen(
        through(str(programs / "horovod-train"), "run", str(path)),
        cwd=folder,
        env=environment(programs=programs, **(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def writing_to(
    output: Any, folder: Path, path: Path, *through: str, stdin: Any = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """`horovod-train run` with a place to write to; what it is started through becomes it."""
    return subprocess.Popen(
        [*through, str(BIN / "horovod-train"), "run", str(path)],
        cwd=folder,
        env=environment(COLUMNS="100", TERM="xterm"),
        stdin=stdin,
        stdout=output,
        stderr=output,
    )


class Running:
    """`horovod-train run` of the task ``Noted``, which is training on all its ranks.

    Attributes:
        process: The launcher; what it was started through has become it.
        all: The processes that it has started on this machine.
        ranks: Those among them that are ranks, in the order of their ranks.
    """

    def __init__(
        self,
        folder: Path,
        path: Path,
        num_ranks: int,
        through: Callable[..., list[str]] = as_it_is,
        env: Mapping[str, str] | None = None,
        programs: Path = BIN,
    ) -> None:
        before = len(list(folder.glob("rank-*.txt")))
        self.process = launched(folder, path, through, env, programs)
        deadline = time.monotonic() + TIMEOUT_S
        while len(list(folder.glob("rank-*.txt"))) < before + num_ranks:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.all = psutil.Process(self.process.pid).children(recursive=True)
        # Not by PID: PIDs begin again at the lowest number.
        self.ranks = sorted(filter(is_rank, self.all), key=rank_of)

    def end(self, within_s: float = 0.0) -> tuple[int, str]:
        """Wait for the end, and return exit code and output.

        Nothing of the run may be left then, or so many seconds later.
        """
        output, _ = self.process.communicate(timeout=60)
        deadline = time.monotonic() + within_s
        while (left := [process for process in self.all if is_alive(process)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        for process in left:
            process.kill()
        assert not left
        return self.process.returncode, output


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def rank_of(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return number_of(process.environ(), "rank", alone=0)
    return 0


def is_rank(process: psutil.Process) -> bool:
    """Started by our launcher, or by hand: a worker, or a program of the tests."""
    with suppress(psutil.NoSuchProcess):  # a zombie counts as one
        program, *arguments = process.cmdline() or [""]
        is_worker = "worker" in arguments[1:4] or arguments[:1] == [str(PROGRAMS / "joined.py")]
        return is_worker and "python" in program
    return False
