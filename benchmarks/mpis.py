"""Step times with each MPI library, as ratios to the best of them.

Two ranks on one host train in turns with each library of `make mpis`, in fresh processes; the order changes
in each round, and a ratio belongs to a round. The time of a step is that of `benchmarks.run`.

usage: python -m benchmarks.mpis [--models mlp,...] [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.models import MODELS
from benchmarks.on_ranks import BIN
from benchmarks.run import NUM_RANKS, OURS, WARMUP_STEPS, Variant, interval_of_median, step_times_s

MPIS = Path(__file__).parents[1] / ".mpis"
TARGET = 1.05


def variants() -> list[Variant]:
    """Return a way to train for each MPI library that is installed."""
    others = sorted(path.parents[1] for path in MPIS.glob("*/bin/horovod-train"))
    programs = {"openmpi4": BIN, **{home.name: home / "bin" for home in others}}
    return [with_programs(name, folder) for name, folder in programs.items()]


def with_programs(name: str, programs: Path) -> Variant:
    """Return a variant that trains with the programs of an environment."""

    def command(model: str, steps: int, folder: Path) -> list[str]:
        OURS.command(model, steps, folder)  # writes the job
        run = [str(programs / "horovod-train"), "run", str(folder / "job.json"), "-n", str(NUM_RANKS)]
        return [*run, "--launcher", "mpirun"]

    return Variant(name, command)


def main() -> None:
    """Measure, and print a line for each model and library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=45)
    options = parser.parse_args()
    for model in options.models.split(","):
        times_s: dict[str, list[float]] = {each.name: [] for each in variants()}
        for number in range(options.rounds):
            shifted = [*variants()[number % len(times_s) :], *variants()[: number % len(times_s)]]
            for each in shifted:
                steps_s = step_times_s(each, model, options.steps)[WARMUP_STEPS:]
                times_s[each.name].append(statistics.median(steps_s))
        best = min(times_s, key=lambda name: statistics.median(times_s[name]))
        for name, found in times_s.items():
            ratios = [own / other for own, other in zip(found, times_s[best], strict=True)]
            median, (low, high) = statistics.median(ratios), interval_of_median(ratios)
            print(
                f"{model:<12} {name:<9} {median:6.3f}  [{low:.3f} .. {high:.3f}] of {best}  "
                f"{1e3 * statistics.median(found):6.1f} ms  {'met' if median <= TARGET else 'MISSED'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
