"""What a step costs the host: the time of a step of a model with one parameter, against another version.

One rank, one sample per step, no exchange: what is left is our loop, PyTorch's calls and the reader. Of
each run the mean of the fastest tenth of its steps is taken, which the rest of the machine disturbs least;
runs of the two versions alternate.

usage: python -m benchmarks.host_time --against CHECKOUT [--pairs N] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.models import Timed
from benchmarks.run import BIN, HERE, PORT, WARMUP_STEPS, Variant, interval_of_median, step_times_s

NUM_STEPS = 6_000


class OneParameter(Timed):
    """A task whose model is a number."""

    def model(self) -> torch.nn.Module:
        """Return the model."""
        return torch.nn.Linear(1, 1, bias=False)

    def train_data(self) -> torch.utils.data.TensorDataset:
        """Return numbers."""
        return torch.utils.data.TensorDataset(torch.linspace(0, 1, NUM_STEPS)[:, None])

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return a loss that changes little; note the time."""
        self._starts.append(perf_counter())
        return (model(batch[0]) ** 2).mean() * 1e-6


class NothingNoted(OneParameter):
    """The same without a list of times, which would grow with steps."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss alone."""
        return (model(batch[0]) ** 2).mean() * 1e-6


def command(_: str, steps: int, folder: Path) -> list[str]:
    """Return the worker alone."""
    job = {
        "name": "host-time",
        "task": f"{__file__}:{OneParameter.__name__}",
        "run_dir": str(folder),
        "train": {"epochs": 1000, "max_steps": steps, "batch_size_per_rank": 1},
        "metrics": {"port": PORT},
        "checkpoint": {"every": None},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return [str(BIN / "python"), "-m", "horovod_train", "worker", "--events", str(path)]


def host_time_us(checkout: Path, steps: int) -> float:
    """Return the mean of the fastest tenth of a run's steps, in microseconds."""
    env = (("PYTHONPATH", f"{checkout}:{HERE.parent}"), ("OMP_NUM_THREADS", "1"))
    times = sorted(step_times_s(Variant(checkout.name, command, env), "", steps)[WARMUP_STEPS:])
    return 1e6 * statistics.fmean(times[: len(times) // 10])


def main() -> None:
    """Print the difference of each pair, and their median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, required=True, help="checkout of another version")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    args = parser.parse_args()
    versions = [HERE.parent, args.against.resolve()]
    differences = []
    for pair in range(args.pairs):
        in_order = versions[:: -1 if pair % 2 else 1]
        times = {checkout: host_time_us(checkout, args.steps) for checkout in in_order}
        now, before = (times[checkout] for checkout in versions)
        differences.append(now - before)
        print(f"{now:.1f} us / {before:.1f} us  {differences[-1]:+.1f} us", flush=True)
    low, high = interval_of_median(differences)
    print(f"median {statistics.median(differences):+.1f} us  [{low:+.1f} .. {high:+.1f}]")


if __name__ == "__main__":
    main()
