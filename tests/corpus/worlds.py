"""Worlds of ranks that are forked from a process which has imported everything: one starts in a fifth of a
second.

Ranks are as a launcher makes them: processes of their own, with Horovod's variables and a real rendezvous
over Gloo. Each runs the product's worker on a job file, so that exit codes are those of a job.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 5.0
"""For so long ranks may go on when one of them has failed; a launcher ends them then, too."""


@dataclass(frozen=True)
class Ended:
    """How a world has ended.

    Attributes:
        codes: Exit code of each rank, negative: a signal; None: it was still running and was killed.
        is_late: All ranks still ran when the time was over.
        output: What ranks have printed.
    """

    codes: list[int | None]
    is_late: bool
    output: str
    seconds: float

    @property
    def code(self) -> int | str:
        """The exit code of the job: that of the rank that has told the cause."""
        if self.is_late:
            return "hang"
        found = [code for code in self.codes if code is not None]
        if any(code < 0 for code in found):
            return "abort"
        return 2 if 2 in found else 3 if 3 in found else max(found)


def run_world(num_ranks: int, act: Callable[[int], int], folder: Path, *, timeout_s: float = 60.0) -> Ended:
    """Fork ranks, let each act, and return how they ended."""
    begun = time.monotonic()
    rendezvous, port = _start_rendezvous(num_ranks)
    pids = [_fork_rank(rank, num_ranks, port, act, folder) for rank in range(num_ranks)]
    codes: list[int | None] = [None] * num_ranks
    deadline = begun + timeout_s
    is_late = False
    handles = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    poller = select.poll()
    for handle in handles:
        poller.register(handle, select.POLLIN)
    waiting = set(handles)
    has_failed = False
    while waiting:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            is_late = not has_failed
            break
        for handle, _ in poller.poll(left_s * 1000):
            poller.unregister(handle)
            waiting.discard(handle)
            rank = handles[handle]
            _, status = os.waitpid(pids[rank], 0)
            codes[rank] = os.waitstatus_to_exitcode(status)
            if codes[rank] != 0 and not has_failed:
                has_failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for handle in waiting:
        with suppress(ProcessLookupError):
            os.killpg(pids[handles[handle]], signal.SIGKILL)
        os.waitpid(pids[handles[handle]], 0)
    for handle in handles:
        os.close(handle)
    os.kill(rendezvous, signal.SIGKILL)
    os.waitpid(rendezvous, 0)
    output = "".join(
        f"--- rank {rank}\n{(folder / f'rank-{rank}.log').read_text(errors='replace')}"
        for rank in range(num_ranks)
    )
    return Ended(codes, is_late, output, time.monotonic() - begun)


def _start_rendezvous(num_ranks: int) -> tuple[int, int]:
    """Fork Horovod's rendezvous server; return its process and its port."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        server = RendezvousServer(verbose=0)
        port = server.start()
        server.init(get_host_assignments(parse_hosts(f"localhost:{num_ranks}"), num_ranks))
        os.write(write, str(port).encode())
        os.close(write)
        time.sleep(3600)
        os._exit(0)
    os.close(write)
    port = int(os.read(read, 16))
    os.close(read)
    return pid, port


def _fork_rank(rank: int, num_ranks: int, port: int, act: Callable[[int], int], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(
            HOROVOD_RANK=str(rank), HOROVOD_SIZE=str(num_ranks),
            HOROVOD_LOCAL_RANK=str(rank), HOROVOD_LOCAL_SIZE=str(num_ranks),
            HOROVOD_CROSS_RANK="0", HOROVOD_CROSS_SIZE="1",
            HOROVOD_HOSTNAME="localhost", HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo",
            HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1", HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
            HOROVOD_GLOO_IFACE="lo", OMP_NUM_THREADS="1",
        )  # fmt: skip
        code = act(rank)
    finally:
        os._exit(code)
