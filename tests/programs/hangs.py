"""A task one of whose ranks stops to go on, in one of many ways."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any

import torch

RANK = int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def loops() -> None:
    number = 0
    while True:
        number += 1


def holds_the_gil() -> None:
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)


def waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def opens_a_pipe() -> None:
    path = f"/tmp/pipe-{os.getpid()}"  # noqa: S108  (nobody writes to it)
    os.mkfifo(path)
    try:
        open(path).read()  # noqa: PTH123, SIM115
    finally:
        os.unlink(path)  # noqa: PTH108


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def enters_another_collective() -> None:
    import horovod.torch as hvd

    hvd.allreduce(torch.ones(3), name="mine")


WAYS = {each.__name__: each for each in (
    loops, holds_the_gil, waits_for_a_lock, opens_a_pipe, is_stopped, enters_another_collective,
)}  # fmt: skip


class Data:
    def __init__(self, way: str) -> None:
        self.way = way

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> Any:
        if self.way and index == 100:
            WAYS[self.way]()
        return torch.ones(4) * (index % 7)


class Hangs:
    """The task.

    Args:
        way: What ``rank`` does in its fifth step.
        rank: The rank.
        data: What reading the sample 100 does, on whichever rank.
    """

    def __init__(self, way: str = "", rank: int = 1, data: str = "") -> None:
        self.way, self.rank, self.data = way, rank, data
        self.num_batches = 0

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 1)

    def train_data(self) -> Any:
        return Data(self.data)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.num_batches += 1
        if self.way and self.rank == RANK and self.num_batches == 5:
            WAYS[self.way]()
        time.sleep(0.01)
        found: torch.Tensor = model(batch).mean()
        return found
