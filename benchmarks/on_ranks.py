"""Ranks of a benchmark: a module of this package, started by ``horovodrun`` with the settings of a job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Job
from horovod_train.horovod.environment import horovod_settings

OUT = "BENCH_OUT"


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
    binaries = Path(sys.executable).parent
    command = [str(binaries / "horovodrun"), f"--{controller}", "-np", str(num_ranks)]
    settings = horovod_settings(Job.model_validate({"name": "b", "task": "gpt", "strategy": "pipeline"}))
    folder = Path(tempfile.mkdtemp(prefix="horovod-train-bench-"))
    settings[OUT] = str(folder / "found.json")
    settings["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_ranks))
    settings["OMPI_MCA_mpi_yield_when_idle"] = "1"  # as every launch of a job has it
    done = subprocess.run(
        [*command, sys.executable, "-m", module, "rank", *arguments],
        env={**os.environ, **settings, "PATH": f"{binaries}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return json.loads(Path(settings[OUT]).read_text())
    except OSError:
        raise SystemExit(f"{arguments}: {done.stdout[-2000:]}{done.stderr[-2000:]}") from None
    finally:
        shutil.rmtree(folder)


def tell(world: Communicator, found: object) -> None:
    """Tell it, as rank 0; then leave the world."""
    if world.rank == 0:
        Path(os.environ[OUT]).write_text(json.dumps(found))
    world.close()
