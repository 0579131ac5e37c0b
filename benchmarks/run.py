"""Step times as paired ratios: ours against a hand-written Horovod loop and DistributedDataParallel.

Each comparison runs A B A B ... in fresh processes and prints the ratio of each pair: the machine's
speed drifts, ratios of neighbours do not. The time of a step is the time between two calls of the
loss function on rank 0, medians over a process, the first steps left out.

usage: python -m benchmarks.run [--models mlp,...] [--pairs N] [--steps N] [--only NAME,...]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.models import MODELS

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
WARMUP_STEPS = 5
NUM_RANKS = 2
PORT = 29700


@dataclass(frozen=True)
class Variant:
    """One way to train: a command that gets (model, steps, folder)."""

    name: str
    command: Callable[[str, int, Path], list[str]]
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two variants and the ratio that was aimed at.

    Attributes:
        steps: Steps of a run; 0: as the command line says.
        use_mean: Compare means: what happens once in fifty steps does not move a median.
    """

    name: str
    ours: Variant
    other: Variant
    target: float
    steps: int = 0
    use_mean: bool = False


def horovodrun(*command: str) -> list[str]:
    """Return a launch of ranks with MPI, the same for all who use Horovod."""
    return [str(BIN / "horovodrun"), "--mpi", "-np", str(NUM_RANKS), sys.executable, *command]


def ours(name: str, **overrides: object) -> Variant:
    """Return our trainer with some fields of the job changed."""

    def command(model: str, steps: int, folder: Path) -> list[str]:
        job = {
            "name": "bench",
            "task": f"{HERE / 'models.py'}:{MODELS[model].__name__}",
            "run_dir": str(folder),
            "train": {"epochs": 1000, "max_steps": steps, "batch_size_per_rank": MODELS[model].batch_size},
            "optimizer": {"name": "sgd", "args": {"momentum": 0.9}},
            "metrics": {"port": PORT},
            "checkpoint": {"every_epochs": None},
        }
        for section, fields in overrides.items():
            job[section] = {**job.get(section, {}), **fields}  # type: ignore[dict-item]
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        return horovodrun("-m", "horovod_train", "worker", "--events", str(path))

    return Variant(name, command)


OURS = ours("ours")
OURS_GLOO = Variant(
    "ours on gloo",
    lambda model, steps, folder: [
        "--gloo" if part == "--mpi" else part for part in OURS.command(model, steps, folder)
    ],
)
PLAIN = Variant(
    "hand-written", lambda model, steps, _: horovodrun(str(HERE / "plain_horovod.py"), model, str(steps))
)


def ddp(bucket_mb: int) -> Variant:
    """Return DistributedDataParallel under torchrun."""
    return Variant(
        f"DDP {bucket_mb} MB",
        lambda model, steps, _: [
            str(BIN / "torchrun"), f"--nproc-per-node={NUM_RANKS}", "--master-addr=127.0.0.1",
            f"--master-port={PORT + 50}", str(HERE / "plain_ddp.py"), model, str(steps), str(bucket_mb),
        ],
    )  # fmt: skip


def comparisons() -> list[Comparison]:
    """Return everything that is compared."""
    return [
        Comparison("hand-written Horovod", OURS, PLAIN, 1.02),
        Comparison("DDP over Gloo", OURS, ddp(25), 1.00),
        Comparison("DDP, small buckets", OURS, ddp(4), 1.00),
        Comparison("metrics on / off", OURS, ours("no metrics", metrics={"enabled": False}), 1.01),
        Comparison(
            "checkpoint every 50 steps / none",
            ours("checkpoints", checkpoint={"every_epochs": None, "every_steps": 50}),
            OURS,
            1.05,
            steps=111,
            use_mean=True,
        ),
    ]


def step_time_s(variant: Variant, model: str, steps: int) -> tuple[float, float]:
    """Run a variant in fresh processes; return (median, mean) time of a step."""
    folder = Path(tempfile.mkdtemp(prefix="horovod-train-bench-"))
    out = folder / "starts.json"
    env = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "BENCH_OUT": str(out),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // NUM_RANKS)),
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONPATH": str(HERE.parent),
        **dict(variant.env),
    }
    try:
        done = subprocess.run(
            variant.command(model, steps, folder), env=env, capture_output=True, text=True, check=False
        )
        if done.returncode != 0 or not out.exists():
            sys.exit(f"{variant.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        starts = json.loads(out.read_text())[WARMUP_STEPS:]
    finally:
        shutil.rmtree(folder)
    times = [after - before for before, after in pairwise(starts)]
    return statistics.median(times), statistics.fmean(times)


def compare(comparison: Comparison, model: str, pairs: int, steps: int) -> list[float]:
    """Print and return the ratio of each pair."""
    use_mean, steps = comparison.use_mean, comparison.steps or steps
    ratios, a_times, b_times = [], [], []
    for _ in range(pairs):
        a = step_time_s(comparison.ours, model, steps)[use_mean]
        b = step_time_s(comparison.other, model, steps)[use_mean]
        a_times.append(a)
        b_times.append(b)
        ratios.append(a / b)
    median = statistics.median(ratios)
    verdict = "met" if median <= comparison.target else "MISSED"
    print(
        f"{model:<13} {comparison.name:<34} {median:6.3f}  [{min(ratios):.3f} .. {max(ratios):.3f}]  "
        f"{1e3 * statistics.median(a_times):7.1f} ms / {1e3 * statistics.median(b_times):7.1f} ms  "
        f"target {comparison.target:.2f} {verdict}",
        flush=True,
    )
    return ratios


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default="", help="part of a comparison's name")
    args = parser.parse_args()
    print(f"{NUM_RANKS} ranks, {args.pairs} pairs of {args.steps} steps; ratio of step times, ours / other")
    for model in args.models.split(","):
        for comparison in comparisons():
            if args.only in comparison.name:
                compare(comparison, model, args.pairs, args.steps)


if __name__ == "__main__":
    main()
