"""Benchmark of all-reduces from small to large messages, through Horovod (CPU and GPU) and mpi4py.

    python -m horovod_train.frameworks.torch.comm.allreduce_benchmark      on every rank, under any launcher

Rank 0 reports the median time of each size as an event. With the MPI controller, the benchmark includes
mpi4py, and rank 0 also reports the time that each pair of hosts needs to exchange a message.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.collectives.horovod import connect
from horovod_train.config.launch import Launch
from horovod_train.config.schema import Job
from horovod_train.events.file import channel_of
from horovod_train.events.types import AllreduceTime, BenchmarkDone, PairTime
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator, mpi, tensor_communicator
from horovod_train.frameworks.torch.framework import choose_device
from horovod_train.horovod.environment import from_slurm
from horovod_train.registry import EXAMPLE_TASK

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SIZES_BYTES = tuple(4**power for power in range(5, 14))
"""1 KiB .. 64 MiB."""

SECONDS_PER_SIZE = 0.4
MAX_ROUNDS = 200
PAIR_BYTES = 1 << 20
PAIR_ROUNDS = 5


def main() -> None:
    """Run the benchmark; rank 0 reports the results."""
    os.environ.update(from_slurm(os.environ))
    job = Job(name="doctor", task=EXAMPLE_TASK, launch=Launch(share_gpus=True))
    world = connect(TorchCommunicator, job)
    reporter = Reporter(world.rank, as_json=True, channel=channel_of(os.environ))
    times = measure(world, "horovod", horovod_sum(world, torch.device("cpu")))
    if (device := choose_device(job, world)).type == "cuda":
        times += measure(world, "nccl", horovod_sum(world, device))
    pairs: list[PairTime] = []
    if tensor_communicator(world).is_over_mpi:
        communicator = mpi_communicator()
        times += measure(world, "mpi4py", mpi_sum(communicator))
        pairs = exchange_in_pairs(world, communicator)
    if world.rank == 0:
        for event in (*times, *pairs, BenchmarkDone(world_size=world.size)):
            reporter.report(event)
    world.close()


def horovod_sum(world: Communicator, device: torch.device) -> Callable[[int], None]:
    """Return a function that all-reduces the given number of bytes through Horovod, and waits for the sum."""
    ranks = tensor_communicator(world)
    buffers = {size: torch.zeros(size // 4, device=device) for size in SIZES_BYTES}

    def add_up(size: int) -> None:
        ranks.wait(ranks.start_allreduce(buffers[size], f"allreduce_benchmark.{device.type}.{size}"))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return add_up


def mpi_communicator() -> Intracomm:
    """Return ``COMM_WORLD``; Horovod has already initialized MPI."""
    world: Intracomm = mpi().COMM_WORLD
    return world


def mpi_sum(communicator: Intracomm) -> Callable[[int], None]:
    """Return a function that all-reduces the given number of bytes through mpi4py: the reference."""
    buffers = {
        size: (np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)) for size in SIZES_BYTES
    }
    return lambda size: communicator.Allreduce(*buffers[size])


def measure(world: Communicator, via: str, add_up: Callable[[int], None]) -> list[AllreduceTime]:
    """Return the time of one all-reduce for each size: the median over rounds of the slowest rank's time.

    ``bytes_per_s`` is the bus bandwidth, bytes x 2 (n - 1) / n / time: the rate at which each rank sends in
    a ring of n ranks.
    """
    found = []
    for size in SIZES_BYTES:
        add_up(size)  # the first call opens connections
        started = perf_counter()
        add_up(size)
        (slowest,) = world.allreduce_sum([perf_counter() - started])
        rounds = max(3, min(MAX_ROUNDS, int(SECONDS_PER_SIZE * world.size / max(slowest, 1e-6))))
        times = [timed(lambda: add_up(size)) for _ in range(rounds)]  # noqa: B023  (called at once)
        seconds = statistics.median(max(column) for column in zip(*allgather_json(world, times), strict=True))
        moved = size * 2 * (world.size - 1) / world.size
        found.append(AllreduceTime(via=via, size_bytes=size, seconds=seconds, bytes_per_s=moved / seconds))
    return found


def timed(do: Callable[[], None]) -> float:
    """Return the duration of a call, in seconds."""
    started = perf_counter()
    do()
    return perf_counter() - started


def exchange_in_pairs(world: Communicator, communicator: Intracomm) -> list[PairTime]:
    """Return the time that each pair of hosts needs to exchange 1 MiB, one pair at a time. Collective."""
    hosts: list[str] = allgather_json(world, world.host)
    leaders: Mapping[str, int] = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
    names = list(leaders)
    found = []
    out, into = np.zeros(PAIR_BYTES, np.uint8), np.empty(PAIR_BYTES, np.uint8)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            mine = {leaders[one]: leaders[other], leaders[other]: leaders[one]}.get(world.rank)
            times = [0.0]
            communicator.Barrier()
            if mine is not None:
                exchange = lambda: communicator.Sendrecv(out, mine, recvbuf=into, source=mine)  # noqa: B023, E731
                times = [timed(exchange) for _ in range(PAIR_ROUNDS)]
            seconds = max(allgather_json(world, statistics.median(times)))
            found.append(PairTime(hosts=(one, other), seconds=seconds))
    return found


if __name__ == "__main__":
    main()
