"""What the gradient noise scale and random numbers by sample cost, on two ranks.

Steps with and without alternate within one training: processes on a shared machine differ by more than
the cost that is measured. The noise scale alternates by steps, or by blocks of ten steps of which one is
measured, in the order with, without, without, with; a pair is one epoch. Random numbers alternate by epochs,
because loaders draw by sample for a whole epoch; a pair is an epoch with, and the next one without. The
ratio of a pair is that of the mean step times, without the slowest fifth.

usage: python -m benchmarks.scaling [--pairs N] [--steps N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.on_ranks import found_on_ranks, tell
from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.framework import TorchFramework
from horovod_train.frameworks.torch.step.random import draws_of
from horovod_train.rank import make_run
from horovod_train.training.loop import begin, finish_epoch, rest_of_epoch
from horovod_train.training.run import Run

KINDS = ("noise scale every 10 steps", "noise scale in each step", "random numbers by sample")
WARMUP_EPOCHS = 2
BLOCK = 10


class Samples:
    """Token sequences as vectors, of which a random part is read."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        start = int(torch.randint(16, ()))
        return torch.ones(80, 128)[start : start + 64] * (index % 7 - 3), index % 10


class Transformer:
    """A transformer of four layers with dropout, and noise on its input."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def model(self) -> nn.Module:
        """Return the network."""
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(64 * 128, 10))

    def train_data(self) -> Samples:
        """Return the samples."""
        return Samples(self._num_samples)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss."""
        values, labels = batch
        return functional.cross_entropy(model(values + 0.1 * torch.randn_like(values)), labels)


def draw_by_sample(run: Run, *, is_on: bool) -> None:
    """Draw random numbers by sample or by rank in the next epoch."""
    replica: Any = run.replica
    train = run.job.train.model_copy(update={"randomness": "sample" if is_on else "rank"})
    replica.draws = draws_of(train, replica.device)
    if is_on:
        replica.draws._finder = None  # noqa: SLF001  (it records the first micro-batch of a job)
    run.train_reader._by_sample = is_on  # type: ignore[attr-defined]  # noqa: SLF001


def rank(kind: str, pairs: int, steps: int) -> None:
    """Train on this rank, and tell the ratio of each pair."""
    batch_size = 8
    job = Job.model_validate(
        {
            "name": "b",
            "task": "benchmarks.scaling:Transformer",
            "task_args": {"num_samples": 2 * batch_size * steps},
            "train": {"epochs": 10_000, "batch_size_per_rank": batch_size, "device": "cpu"},
            "lr": {"base_lr": 1e-4},
            "metrics": {"noise_scale_every_steps": 10 if kind in KINDS[:2] else None},
        }
    )
    framework = TorchFramework()
    world = framework.connect(job)
    run = make_run(job, Mesh(world, world), *framework.prepare(job, Mesh(world, world)))
    run.replica.broadcast()
    begin(run)
    ratios: list[float] = []
    off_s, times_s = 0.0, dict[bool, list[float]]({True: [], False: []})
    for epoch in range(WARMUP_EPOCHS + pairs * (2 if kind == KINDS[2] else 1)):
        if kind == KINDS[2]:
            draw_by_sample(run, is_on=epoch % 2 == 0)
        for number, step in enumerate(rest_of_epoch(run)):
            is_on = epoch % 2 == 0 if kind == KINDS[2] else is_with(kind, number)
            if kind != KINDS[2]:
                run.replica.noise.is_due = is_on and (kind == KINDS[1] or number % BLOCK == 0)  # type: ignore[attr-defined]
            begun_s = perf_counter()
            run.replica.step(step, run.lr_of(step.share.num_samples), want_norm=False)
            times_s[is_on].append(perf_counter() - begun_s)
            run.progress.advance(step.share.num_samples, 0.0)
        finish_epoch(run)
        if epoch < WARMUP_EPOCHS:
            times_s = {True: [], False: []}
        elif times_s[True] and times_s[False]:
            off_s = without_slowest(times_s[False])
            ratios.append(without_slowest(times_s[True]) / off_s)
            times_s = {True: [], False: []}
    tell(world, {"ratios": ratios, "s": off_s})


def is_with(kind: str, number: int) -> bool:
    """Return whether the noise scale is on in a step: with, without, without, with."""
    return (number if kind == KINDS[1] else number // BLOCK) % 4 in {0, 3}


def without_slowest(times_s: list[float]) -> float:
    """Return the mean time, without the slowest fifth."""
    return statistics.fmean(sorted(times_s)[: -len(times_s) // 5])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=80)
    chosen = parser.parse_args()
    print("| on against off | median ratio | lowest | highest | step |")
    print("|---|---|---|---|---|", flush=True)
    for kind in KINDS:
        found = found_on_ranks(__spec__.name, [kind, str(chosen.pairs), str(chosen.steps)], 2, "mpi")
        ratios = sorted(found["ratios"])
        print(
            f"| {kind} | {statistics.median(ratios):.3f} | {ratios[0]:.3f} | {ratios[-1]:.3f} | "
            f"{1000 * found['s']:.0f} ms |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
