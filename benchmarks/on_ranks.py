"""Ranks of a benchmark: a module of this package, started by ``horovodrun`` with the settings of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Job
from horovod_train.horovod.environment import horovod_settings

OUT = "BENCH_OUT"
BIN = Path(sys.executable).parent


def found_on_ranks(module: str, arguments: Sequence[str], num_ranks: int, controller: str) -> Any:
    """Return what rank 0 tells.

    Args:
        module: Run on each rank, with "rank" and the arguments; it calls ``tell``.
        arguments: Of the module.
        num_ranks: So many are started.
        controller: ``mpi`` or ``gloo``.

    Raises:
        SystemExit: It tells nothing; with the last of what was said.
    """
    command = [str(BIN / "horovodrun"), f"--{controller}", "-np", str(num_ranks)]
    settings = horovod_settings(Job.model_validate({"name": "b", "task": "gpt", "strategy": "pipeline"}))
    with TemporaryDirectory(prefix="horovod-train-bench-") as folder:
        out = Path(folder) / "found.json"
        done = subprocess.run(
            [*command, sys.executable, "-m", module, "rank", *arguments],
            env={**environment(out, num_ranks), **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        if not out.exists():
            raise SystemExit(f"{arguments}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return json.loads(out.read_text())


def environment(out: Path, num_ranks: int) -> dict[str, str]:
    """Return the variables that every launch sets for its ranks, and where they tell what they find."""
    return {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        OUT: str(out),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks)),
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }


def tell(world: Communicator, found: object) -> None:
    """Tell it, as rank 0; then leave the world."""
    if world.rank == 0:
        Path(os.environ[OUT]).write_text(json.dumps(found))
    world.close()
