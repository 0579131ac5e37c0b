"""How long ranks of a pipeline stand idle: in seconds, with stages that sleep, against the formula.

Four ranks that compute do not fit two cores; four that sleep do. Each of eight layers takes as long as it is
told, backward twice as long. ``--picture FILE`` draws who did what when.

usage: python -m benchmarks.bubble [--ranks 4] [--micro-batches 8] [--layer-ms 20] [--picture FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.on_ranks import found_on_ranks, tell
from horovod_train.collectives.base import Mesh
from horovod_train.config.arguments import axes_of
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.framework import TorchFramework
from horovod_train.plugins.pipeline.passes import bubble
from horovod_train.training.loop import rest_of_epoch
from horovod_train.worker import make_run

NUM_LAYERS = 8
NUM_STEPS = 4
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Stages of each rank."""
seen: list[tuple[str, float, float]] = []
"""Of this rank: forward or backward, when it began and when it ended."""


def take(kind: str, seconds: float) -> None:
    """Take so long."""
    begun_s = monotonic()
    sleep(seconds)
    seen.append((kind, begun_s, monotonic()))


class Sleeps(torch.autograd.Function):
    """Takes time, and hands on what it gets."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        """Sleep."""
        context.seconds = seconds
        take("forward", seconds)
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Sleep twice as long."""
        take("backward", 2 * context.seconds)
        return gradient, None


class Layer(nn.Module):
    """Sleeps, in training."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seconds = seconds

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Map any shape to the same."""
        slept: torch.Tensor = Sleeps.apply(value * self.scale, self.seconds)  # type: ignore[no-untyped-call]
        return slept


class SleepingLayers:
    """Eight layers in a row.

    Args:
        layer_ms: What each takes forward, in milliseconds.
        num_samples: Of an epoch.
    """

    def __init__(self, layer_ms: float = 20.0, num_samples: int = 8) -> None:
        self._layer_ms, self._num_samples = layer_ms, num_samples

    def model(self) -> nn.Module:
        """Map [batch, 4] to the same."""
        return nn.Sequential(*(Layer(self._layer_ms / 1e3) for _ in range(NUM_LAYERS)))

    def pipeline_parts(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers."""
        return list(model)  # type: ignore[call-overload,no-any-return]

    def train_data(self) -> TensorDataset:
        """Return ones."""
        return TensorDataset(torch.ones(self._num_samples, 4))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return a mean."""
        mean: torch.Tensor = model(batch[0]).mean()
        return mean


@dataclass(frozen=True)
class Step:
    """What ranks did in a step: for each, passes with their begin and end in seconds."""

    ranks: list[list[tuple[str, float, float]]]

    @property
    def span(self) -> tuple[float, float]:
        """When the first pass began, and when the last one ended."""
        passes = [each for rank in self.ranks for each in rank]
        return min(begun for _, begun, _ in passes), max(ended for _, _, ended in passes)

    @property
    def bubble(self) -> float:
        """The part of the time in which ranks did nothing."""
        begun_s, ended_s = self.span
        busy_s = sum(ended - begun for rank in self.ranks for _, begun, ended in rank)
        return 1 - busy_s / (ended_s - begun_s) / len(self.ranks)


def rank_main(schedule: str, num_micro_batches: str, layer_ms: str) -> None:
    """Make steps on this rank; rank 0 prints what all have done in each."""
    torch.set_num_threads(1)
    arguments = {"schedule": schedule, "virtual_stages_per_rank": SCHEDULES[schedule]}
    num = int(num_micro_batches)
    job = Job.model_validate(
        {
            "name": "bubble",
            "task": f"{__file__}:SleepingLayers",
            "task_args": {"layer_ms": float(layer_ms), "num_samples": num * NUM_STEPS},
            "train": {"batch_size_per_rank": 1, "accumulation_steps": num},
            "strategy": {"name": "pipeline", "args": arguments},
        }
    )
    framework = TorchFramework()
    world = framework.connect(job)
    mesh = Mesh.of(world, axes_of(job.strategy, world.size))
    run = make_run(job, mesh, *framework.prepare(job, mesh))
    task: Any = sys.modules[type(run.replica.task).__module__]  # type: ignore[attr-defined]
    found = []
    for step in rest_of_epoch(run):
        world.allgather(b"")
        task.seen.clear()
        run.replica.step(step, 0.1, want_norm=False)
        found.append([json.loads(each) for each in world.allgather(json.dumps(task.seen).encode())])
    tell(world, found[1:])  # the first makes connections


def measured(schedule: str, options: argparse.Namespace) -> Step:
    """Start ranks; return the step with the shortest span: what else runs here makes others longer."""
    arguments = [schedule, str(options.micro_batches), str(options.layer_ms)]
    found = found_on_ranks("benchmarks.bubble", arguments, options.ranks, "gloo")
    return min(map(Step, found), key=lambda step: step.span[1] - step.span[0])


def draw(steps: dict[str, Step], path: Path) -> None:
    """Draw the passes of each schedule, rank by rank."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "horovod_train"})
    figure, all_axes = plt.subplots(len(steps), 1, figsize=(11, 5.4), sharex=True)
    for axes, (schedule, step) in zip(all_axes, steps.items(), strict=True):
        first_s, last_s = step.span
        for rank, passes in enumerate(step.ranks):
            for kind, colour in (("forward", "#4c78a8"), ("backward", "#f58518")):
                bars = [(begun - first_s, ended - begun) for each, begun, ended in passes if each == kind]
                axes.broken_barh(
                    bars, (rank - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.4
                )
        axes.set_title(f"{schedule}: {last_s - first_s:.2f} s, idle {100 * step.bubble:.0f} %", fontsize=10)
        axes.set_yticks(range(len(step.ranks)), [f"rank {rank}" for rank in range(len(step.ranks))])
        axes.invert_yaxis()
    all_axes[-1].set_xlabel("seconds (blue: forward, orange: backward)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure each schedule, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layer-ms", type=float, default=20.0)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    print(f"{'schedule':<14}{'seconds':>8}{'idle':>8}{'formula':>9}{'ratio':>8}")
    steps = {}
    for schedule, num_chunks in SCHEDULES.items():
        step = steps[schedule] = measured(schedule, options)
        expected = bubble(options.ranks, options.micro_batches, num_chunks)
        seconds = step.span[1] - step.span[0]
        ratio = step.bubble / expected
        print(f"{schedule:<14}{seconds:>8.2f}{step.bubble:>8.3f}{expected:>9.3f}{ratio:>8.3f}", flush=True)
    if options.picture:
        draw(steps, options.picture)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(*sys.argv[2:])
    else:
        main()
