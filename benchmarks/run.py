"""Step times as paired ratios: ours against a hand-written Horovod loop and DistributedDataParallel.

Each comparison runs A B A B ... in fresh processes, or in turns within one, and prints the ratio of
each pair: the machine's speed drifts, ratios of neighbours do not. The time of a step is the time
between two calls of the loss function on rank 0; the first steps are left out.

usage: python -m benchmarks.run [--models mlp,...] [--pairs N] [--steps N] [--only NAME]
       python -m benchmarks.run --against CHECKOUT    compare with another version's checkout instead
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.alternating import is_recorded
from benchmarks.in_turns import is_ours
from benchmarks.models import MODELS
from benchmarks.on_ranks import BIN, environment

HERE = Path(__file__).parent
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
        other: None: ours does both in turns, which hides the drift between processes.
        is_first: Whether a step, counted from 0, is one of the first kind; None: of neither.
        steps: Steps of a run; 0: as the command line says.
        use_mean: Compare means: what happens once in fifty steps does not move a median.
    """

    name: str
    ours: Variant
    other: Variant | None
    target: float
    is_first: Callable[[int], bool | None] = lambda _: None
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
            "checkpoint": {"every": None},
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


def both_in(script: str, *env: tuple[str, str], of: Variant = OURS) -> Variant:
    """Return a script that trains in both ways, in turns, in the place of our worker."""

    def command(model: str, steps: int, folder: Path) -> list[str]:
        launch = of.command(model, steps, folder)[:5]
        return [*launch, str(HERE / script), str(folder / "job.json")]

    return Variant(script, command, env)


ALTERNATING = both_in("alternating.py")
IN_TURNS = both_in("in_turns.py", ("HOROVOD_FUSION_THRESHOLD", str(128 * 2**20)))
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


def against(checkout: Path) -> Comparison:
    """Compare with another version of this package, with the same engine."""
    before = replace(OURS, name="before", env=(("PYTHONPATH", f"{checkout}:{HERE.parent}"),))
    return Comparison(f"the version in {checkout.name}", OURS, before, 1.02)


def comparisons() -> list[Comparison]:
    """Return everything that is compared."""
    return [
        Comparison("hand-written Horovod", OURS, PLAIN, 1.02),
        Comparison("DDP over Gloo", OURS, ddp(25), 1.00),
        Comparison("DDP, small buckets", OURS, ddp(4), 1.00),
        Comparison("hand-written, in turns", IN_TURNS, None, 1.01, is_first=is_ours, steps=90),
        Comparison("metrics on / off, in turns", ALTERNATING, None, 1.01, is_first=is_recorded, steps=125),
        Comparison(
            "50 steps with a checkpoint / without",
            ours("checkpoints", checkpoint={"every": "100 steps"}),
            None,
            1.05,
            is_first=follows_checkpoint,
            steps=400,
            use_mean=True,
        ),
    ]


def follows_checkpoint(step: int) -> bool | None:
    """Whether a step is one of the 50 after a checkpoint (every 100 steps), or of the 50 after those.

    A checkpoint is taken at the end of step 99: its copy belongs to that step's time.
    """
    return None if step < 99 else (step - 99) % 100 < 50


def step_times_s(variant: Variant, model: str, steps: int) -> list[float]:
    """Run a variant in fresh processes; return the time of each step."""
    folder = Path(tempfile.mkdtemp(prefix="horovod-train-bench-"))
    out = folder / "starts.json"
    env = {
        **environment(out, NUM_RANKS),
        "PYTHONPATH": str(HERE.parent),
        **dict(variant.env),
    }
    try:
        done = subprocess.run(
            variant.command(model, steps, folder), env=env, capture_output=True, text=True, check=False
        )
        if done.returncode != 0 or not out.exists():
            sys.exit(f"{variant.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        starts = json.loads(out.read_text())
    finally:
        shutil.rmtree(folder)
    return [after - before for before, after in pairwise(starts)]


def pair_of_times_s(
    comparison: Comparison, model: str, steps: int, *, other_first: bool
) -> tuple[float, float]:
    """Return the typical time of a step with each of two variants, run one after the other or in turns."""
    typical = statistics.fmean if comparison.use_mean else statistics.median
    if comparison.other is not None:
        both = [comparison.ours, comparison.other][:: -1 if other_first else 1]
        times = [typical(step_times_s(variant, model, steps)[WARMUP_STEPS:]) for variant in both]
        ours, other = times[:: -1 if other_first else 1]
        return ours, other
    ours = step_times_s(comparison.ours, model, steps)[WARMUP_STEPS:]
    kinds = [comparison.is_first(step) for step in range(WARMUP_STEPS, WARMUP_STEPS + len(ours))]
    first, second = (
        [t for t, kind in zip(ours, kinds, strict=True) if kind is wanted] for wanted in (True, False)
    )
    return typical(first), typical(second)


def compare(comparison: Comparison, model: str, pairs: int, steps: int) -> list[float]:
    """Print and return the ratio of each pair."""
    times = [
        pair_of_times_s(comparison, model, comparison.steps or steps, other_first=bool(pair % 2))
        for pair in range(pairs)
    ]
    ratios = [ours / other for ours, other in times]
    median = statistics.median(ratios)
    low, high = interval_of_median(ratios)
    verdict = "met" if median <= comparison.target else "MISSED"
    print(
        f"{model:<19} {comparison.name:<34} {median:6.3f}  [{low:.3f} .. {high:.3f}]  "
        f"{1e3 * statistics.median(ours for ours, _ in times):7.1f} ms / "
        f"{1e3 * statistics.median(other for _, other in times):7.1f} ms  "
        f"target {comparison.target:.2f} {verdict}",
        flush=True,
    )
    return ratios


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that holds the median with at least 95 % probability, whatever the distribution.

    Its ends are the k-th smallest and the k-th largest of n values, k as large as it may be: the median is
    outside with probability 2 P(B < k), B binomial with n trials of 1/2 (Conover, Practical Nonparametric
    Statistics, section 3.2). Fewer than 6 values do not suffice; then it is the smallest and the largest.
    """
    ordered, n = sorted(values), len(values)
    k = 1
    while 2 * sum(math.comb(n, i) for i in range(k + 1)) <= 0.05 * 2**n:
        k += 1
    return ordered[k - 1], ordered[n - k]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default="", help="part of a comparison's name")
    parser.add_argument("--against", type=Path, help="checkout of another version")
    args = parser.parse_args()
    print(
        f"{NUM_RANKS} ranks, {args.pairs} pairs of {args.steps} steps; ratio of step times, ours / other: "
        "median and its 95 % interval"
    )
    for model in args.models.split(","):
        for comparison in [against(args.against.resolve())] if args.against else comparisons():
            if args.only in comparison.name:
                compare(comparison, model, args.pairs, args.steps)


if __name__ == "__main__":
    main()
