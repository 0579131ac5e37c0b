"""Start the product as a user would, in processes of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

BIN = Path(sys.executable).parent
# MXNet needs the NumPy of its time, and so an environment of its own; `make mxnet` makes it.
MXNET_BIN = Path(__file__).parents[2] / ".venv-mxnet" / "bin"
PROGRAMS = Path(__file__).parent.parent / "programs"
# The framework in NumPy, installed as another package's would be.
PLUGIN = Path(__file__).parent.parent / "plugin"
TIMEOUT_S = 400


def mostly(controller: str) -> pytest.MarkDecorator:
    """Take this controller in `make test`, and the other one in `make campaign`."""
    (other,) = {"mpi", "gloo"} - {controller}
    return pytest.mark.parametrize(
        "controller", [controller, pytest.param(other, marks=pytest.mark.campaign)]
    )


def name_of(framework: str) -> str:
    """The framework of a job; in the tests Keras stands with its back end: ``keras on jax``."""
    return framework.partition(" on ")[0]


def variables_of(framework: str) -> dict[str, str]:
    """The environment variables that choose a back end, and let ranks of PyTorch be split into groups."""
    back_end = framework.partition(" on ")[2]
    groups = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if framework == "torch" else {}
    return {"KERAS_BACKEND": back_end} if back_end else groups


def bin_of(framework: str) -> Path:
    """The programs of the environment in which a framework is installed."""
    if framework != "mxnet":
        return BIN
    if not (MXNET_BIN / "horovodrun").exists():
        pytest.skip("MXNet's environment is missing: run `make mxnet`")
    return MXNET_BIN


def environment(*, programs: Path = BIN, **extra: str) -> dict[str, str]:
    """The environment of this environment's programs, without what this test run was started with."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "OMPI", "PMI", "BENCH"))}
    return {
        **kept,
        "PATH": f"{programs}{os.pathsep}{kept['PATH']}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "OMPI_MCA_mpi_yield_when_idle": "1",
        **extra,
        "PYTHONPATH": os.pathsep.join(filter(None, (extra.get("PYTHONPATH"), str(PLUGIN)))),
    }


def on_horovod(
    num_ranks: int,
    controller: str,
    program: str,
    *arguments: str,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    programs: Path = BIN,
) -> subprocess.CompletedProcess[str]:
    """Run one of ``tests/programs`` on real ranks under the real horovodrun."""
    command = [
        str(programs / "horovodrun"), f"--{controller}", "-np", str(num_ranks),
        str(programs / "python"), str(PROGRAMS / program), *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env=environment(programs=programs, **(env or {})),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def job_of_kind(folder: Path, framework: str, task: str, kind: str) -> Path:
    """Write a short job on two ranks for a task that has an argument ``kind``."""
    return write_job(
        folder / f"{kind}.yaml",
        framework=framework,
        task=task,
        task_args={"kind": kind},
        run_dir=str(folder / "runs"),
        train={"epochs": 2, "batch_size_per_rank": 8},
        lr={"scaling": "none"},
        launch={"num_ranks": 2, "threads_per_rank": 1},
    )


def cli(
    *arguments: str, cwd: Path, check: bool = True, programs: Path = BIN, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``horovod-train``; with ``check``, it has to end well."""
    done = subprocess.run(
        [str(programs / "horovod-train"), *arguments],
        cwd=cwd,
        env=environment(programs=programs, **env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def write_job(path: Path, **fields: Any) -> Path:
    """Write a job description; metrics go to free ports unless the test says otherwise."""
    job = {"name": "test", "metrics": {"port": free_port()}, **fields}
    path.write_text(yaml.safe_dump(job))
    return path


def quick_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a job of a second on two ranks; this process submits as from a folder of its own account."""
    for name, value in environment(XDG_STATE_HOME=str(folder / "state")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    return {
        "name": "test",
        "framework": "numpy",
        "task": f"{PROGRAMS / 'quick_tasks.py'}:Noted",
        "task_args": {"notes": str(folder), "pause_s": 0.02},
        "run_dir": "runs",
        "train": {"epochs": 3, "batch_size_per_rank": 4},
        "metrics": {"port": free_port()},
        "launch": {"num_ranks": 2},
    }


def free_port() -> int:
    """Return a port below the ephemeral range with a few free ones behind it."""
    first = os.getpid() * 331 % 1375  # processes that run at the same time begin far from each other
    for number in range(1375):
        port = 21000 + (first + number) % 1375 * 8
        try:
            for offset in range(4):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        return port
    raise RuntimeError("no free port")


def results(folder: Path) -> list[Any]:
    """Return what each rank of a program wrote to ``rank-<n>.json``, by rank."""
    files = sorted(folder.glob("rank-*.json"), key=lambda file: int(file.stem.split("-")[1]))
    return [json.loads(file.read_text()) for file in files]
