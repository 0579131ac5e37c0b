"""The learning-rate policy does what it is for: the digits job, unchanged, on 1, 2 and 4 ranks.

Trains the shipped job with five seeds on each number of ranks, and on 4 ranks once more without
scaling, and prints the table of docs/learning-rate.md.

usage: python -m benchmarks.accuracy [--seeds N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BIN = Path(sys.executable).parent
ROWS = ((1, "linear"), (2, "linear"), (4, "linear"), (4, "none"))


def accuracy(num_ranks: int, scaling: str, seed: int) -> float:
    """Train once, as a user would, and return the accuracy over all evaluation samples."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"train.seed={seed}",
            f"lr.scaling={scaling}",
            f"run_dir={folder}",
            "metrics.enabled=false",
        ]
        command = [str(BIN / "horovod-train"), "run", "digits", "-n", str(num_ranks)]
        for setting in settings:
            command += ["--set", setting]
        # One thread per rank on every row: the sums of a convolution depend on the number of threads.
        environment = {**os.environ, "HOROVOD_TRAIN__LAUNCH__THREADS_PER_RANK": "1"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        last = max(Path(folder).glob("digits/checkpoints/step-*/manifest.json"))
        return float(json.loads(last.read_text())["summary"]["metrics"]["accuracy"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    print("| ranks | global batch | scaling | accuracy, mean | standard deviation | lowest |")
    print("|---|---|---|---|---|---|", flush=True)
    for num_ranks, scaling in ROWS:
        found = [accuracy(num_ranks, scaling, seed) for seed in seeds]
        print(
            f"| {num_ranks} | {32 * num_ranks} | {scaling} | {100 * statistics.fmean(found):.1f} % | "
            f"{100 * statistics.stdev(found):.1f} | {100 * min(found):.1f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
