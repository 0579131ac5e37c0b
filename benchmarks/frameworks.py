"""Step times in every framework as paired ratios: ours against a loop written by hand on the same engine.

The same network of 5.3 million parameters everywhere, 2 ranks. A step is the time between two
batches being read on rank 0.

usage: python -m benchmarks.frameworks [--pairs N] [--steps N] [--only NAME]
       python -m benchmarks.frameworks --against CHECKOUT    compare with another version's checkout instead
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.every_framework.vectors import BATCH_SIZE, LR, MOMENTUM
from benchmarks.run import BIN, NUM_RANKS, PORT, Comparison, Variant, compare

HERE = Path(__file__).parent / "every_framework"
MXNET_BIN = Path(__file__).parents[1] / ".venv-mxnet" / "bin"
TARGET = 1.03
FRAMEWORKS = {
    "tensorflow": "tensorflow_net.py",
    "keras on tensorflow": "keras_net.py",
    "keras on torch": "keras_net.py",
    "keras on jax": "keras_net.py",
    "jax": "jax_net.py",
    "lightning": "torch_net.py",
    "transformers": "torch_net.py",
    "mxnet": "mxnet_net.py",
}


def comparison(name: str, checkout: Path | None) -> Comparison:
    """Return what one framework is compared with: the loop by hand, or another version's checkout."""
    framework, _, back_end = name.partition(" on ")
    programs = MXNET_BIN if framework == "mxnet" else BIN
    env = (
        ("KERAS_BACKEND", back_end or "tensorflow"),
        ("PATH", f"{programs}:/usr/bin:/bin"),
        ("PYTHONPATH", f"{HERE}:{HERE.parents[1]}"),
    )
    ranks = [str(programs / "horovodrun"), "--mpi", "-np", str(NUM_RANKS), str(programs / "python")]

    def ours(_: str, steps: int, folder: Path) -> list[str]:
        job = {
            "name": "bench",
            "framework": framework,
            "task": f"{framework}_net:Task",
            "run_dir": str(folder),
            "train": {"epochs": 1000, "max_steps": steps, "batch_size_per_rank": BATCH_SIZE},
            "optimizer": {"name": "sgd", "args": {"momentum": MOMENTUM}},
            "lr": {"base_lr": LR * NUM_RANKS, "scaling": "none"},
            "metrics": {"port": PORT},
            "checkpoint": {"every": None},
        }
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        return [*ranks, "-m", "horovod_train", "worker", "--events", str(path)]

    def by_hand(_: str, steps: int, __: Path) -> list[str]:
        return [*ranks, str(HERE / FRAMEWORKS[name]), str(steps)]

    now = Variant("ours", ours, env)
    if checkout is None:
        return Comparison("by hand", now, Variant("by hand", by_hand, env), TARGET)
    paths = (("PYTHONPATH", f"{HERE}:{checkout}:{HERE.parents[1]}"),)
    return Comparison(
        f"the version in {checkout.name}", now, replace(now, name="before", env=env + paths), 1.02
    )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help="name of a framework")
    parser.add_argument("--against", type=Path, help="checkout of another version")
    args = parser.parse_args()
    if args.only and args.only not in FRAMEWORKS:
        sys.exit(f"--only is {args.only!r}: one of {', '.join(FRAMEWORKS)}")
    print(
        f"{NUM_RANKS} ranks, {args.pairs} pairs of {args.steps} steps; ratio of step times, ours / other: "
        "median and its 95 % interval"
    )
    checkout = args.against.resolve() if args.against else None
    for name in [args.only] if args.only else FRAMEWORKS:
        compare(comparison(name, checkout), name, args.pairs, args.steps)


if __name__ == "__main__":
    main()
