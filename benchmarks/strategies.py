"""Steps of two ways to train, in turns, on ranks that have a replica of each.

Two processes that do the same differ by several percent on a shared machine; neighbouring turns of one
process do not. Pairs: each strategy and ``allreduce``; ``ddp`` and ``fsdp`` and the same written by hand.
A transformer of 3.3 million parameters, and the same with hardly any samples, so that ranks mostly exchange.
usage: python -m benchmarks.strategies [--ranks 2] [--turns 20] [--models NAME ...] [--pairs NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import product
from time import perf_counter
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.on_ranks import found_on_ranks, tell
from horovod_train.collectives.base import Communicator, Mesh
from horovod_train.config.arguments import axes_of
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.comm.groups import init_process_group
from horovod_train.frameworks.torch.framework import TorchFramework
from horovod_train.frameworks.torch.sizes import units_of
from horovod_train.tasks.gpt import Gpt
from horovod_train.training.loop import rest_of_epoch
from horovod_train.worker import make_run

STEPS_PER_TURN = 4
MODEL = {"layers": 4, "width": 256, "head_width": 64, "num_samples": 512}
MODELS = {"transformer": ({**MODEL, "length": 128}, 4), "communication": ({**MODEL, "length": 16}, 1)}
"""Arguments of the task, and a rank's batch."""
PAIRS = {
    "zero / allreduce": ("zero", "allreduce"),
    "ddp / by hand": ("ddp", "ddp by hand"),
    "fsdp / by hand": ("fsdp", "fsdp by hand"),
    "ddp / allreduce": ("ddp", "allreduce"),
    "fsdp / allreduce": ("fsdp", "allreduce"),
    "tensor_parallel / allreduce": ("tensor_parallel", "allreduce"),
    "deepspeed / fsdp": ("deepspeed", "fsdp"),
    "pipeline / allreduce": ("pipeline", "allreduce"),
}
Step = Callable[[], None]


def ours(name: str, world: Communicator, task_args: dict[str, Any], batch_size: int) -> Step:
    """Return what makes a step of a job; ranks that share a model have as large a batch together."""
    sharing = world.size if name in {"tensor_parallel", "pipeline"} else 1
    pieces = sharing if name == "pipeline" and batch_size > 1 else 1
    job = Job.model_validate(
        {
            "name": "benchmark",
            "task": "gpt",
            "task_args": task_args,
            "train": {"batch_size_per_rank": batch_size * sharing // pieces, "accumulation_steps": pieces},
            "optimizer": {"name": "adamw"},
            "strategy": {"name": name},
        }
    )
    framework = TorchFramework()
    mesh = Mesh.of(world, axes_of(job.strategy, world.size))
    run = make_run(job, mesh, *framework.prepare(job, mesh))
    run.replica.broadcast()

    def endless() -> Iterator[Any]:
        while True:
            yield from rest_of_epoch(run)

    steps = endless()
    return lambda: run.replica.step(next(steps), 1e-4, want_norm=False) and None


def by_hand(name: str, world: Communicator, task_args: dict[str, Any], batch_size: int) -> Step:
    """Return a step of what a careful user writes for torchrun."""
    torch.manual_seed(0)
    task = Gpt(**task_args)
    init_process_group(world, torch.device("cpu"), Job(name="b", task="gpt").health)
    model: Any = task.model()
    if name.startswith("ddp"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=8)
    else:
        for unit in units_of(model).values():
            fully_shard(unit)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = task.train_data()
    sampler: Any = torch.utils.data.DistributedSampler(data, world.size, world.rank)  # type: ignore[arg-type]

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from torch.utils.data.DataLoader(data, batch_size, sampler=sampler)  # type: ignore[arg-type]

    batches = endless()
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        loss = task.loss(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()

    return step


def measured(pair: tuple[str, str], world: Communicator, model: str, turns: int) -> list[list[float]]:
    """Return the seconds of a step of both ways in each turn."""
    first, second = ((by_hand if "by hand" in name else ours)(name, world, *MODELS[model]) for name in pair)
    for step in (first, second) * 4:
        step()
    found = []
    for _ in range(turns):
        seconds = []
        for step in (first, second):
            world.allgather(b"")
            begun = perf_counter()
            for _ in range(STEPS_PER_TURN):
                step()
            world.allgather(b"")
            seconds.append((perf_counter() - begun) / STEPS_PER_TURN)
        found.append(seconds)
    return found


def rank_main(pair: str, model: str, turns: str) -> None:
    """Measure a pair on this rank; rank 0 prints it."""
    torch.set_num_threads(1)
    world = TorchFramework().connect(Job.model_validate({"name": "b", "task": "gpt"}))
    tell(world, measured(PAIRS[pair], world, model, int(turns)))


def main() -> None:
    """Measure all pairs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--controller", default="gloo")
    parser.add_argument("--pairs", nargs="*", default=list(PAIRS))
    options = parser.parse_args()
    print(f"{'model':<15}{'pair':<30}{'ratio':>7}{'quartiles':>16}{'ms/step':>9}")
    for model, pair in product(options.models, options.pairs):
        arguments = [pair, model, str(options.turns)]
        seconds = found_on_ranks("benchmarks.strategies", arguments, options.ranks, options.controller)
        low, middle, high = statistics.quantiles((a / b for a, b in seconds), n=4)
        step_ms = 1e3 * statistics.median(first for first, _ in seconds)
        row = f"{model:<15}{pair:<30}{middle:>7.3f}{low:>8.3f} -{high:>6.3f}{step_ms:>9.1f}"
        print(row, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(*sys.argv[2:])
    else:
        main()
