"""A package of somebody else adds rows from pip install, where no checkout is importable.

It has a framework, a strategy, a codec, a schedule, a tracker, a source and two launchers of a batch system.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from support import outside_queue
from support.launching import TIMEOUT_S, environment, write_job

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "plugin"
TASK = """
import torch

class Task:
    def model(self):
        torch.manual_seed(0)
        return torch.nn.Linear(4, 2)

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4) / 64, torch.ones(16, 2))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""
JOB = {
    "name": "outside",
    "task": "task.py:Task",
    "train": {"epochs": 2, "batch_size_per_rank": 4},
    "strategy": {"name": "copies", "args": {"copies": 2}},
    "allreduce": {"codec": {"name": "rounded", "args": {"to": "fp16"}}},
    "lr": {"base_lr": 0.1, "scaling": "none", "decay": "triangle", "decay_args": {"period": "4 steps"}},
    "metrics": {"trackers": [{"name": "lines", "args": {"digits": 3}}]},
    "launch": {"num_ranks": 2, "threads_per_rank": 1, "controller": "gloo"},
}


def run(*command, **more):
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        **more,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The program of an environment with wheels of this package and of the other one."""
    folder = tmp_path_factory.mktemp("outside")
    # Copies, because a build writes to its source.
    shutil.copytree(PLUGIN, folder / "outside")
    shutil.copytree(ROOT / "horovod_train", folder / "ours" / "horovod_train")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "ours")
    for source in (folder / "ours", folder / "outside"):
        build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
        done = run(*build, "-w", folder / "wheels", source, cwd=folder)
        assert done.returncode == 0, done.stderr
    made = run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    assert made.returncode == 0, made.stderr
    python = folder / "env" / "bin" / "python"
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    # What both packages depend on; a path file is not read inside of it, so that no checkout is found there.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    install = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index")
    done = run(*install, *(folder / "wheels").glob("*.whl"), cwd=folder)
    assert done.returncode == 0, done.stderr
    return python.parent / "horovod-train"


@pytest.fixture
def cli(installed, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    env = environment()
    env.pop("PYTHONPATH", None)
    env["PATH"] = f"{installed.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def call(*words, **more):
        return run(installed, *words, cwd=tmp_path, env={**env, **more})

    return call


def job(folder, **changes):
    return write_job(folder / "job.yaml", **{**JOB, **changes})


def test_no_checkout_is_importable(installed):
    where = run(
        installed.parent / "python", "-P", "-c", "import horovod_train; print(horovod_train.__file__)"
    )

    assert str(installed.parent.parent) in where.stdout, where.stderr


def test_a_job_is_trained_with_all_of_it(cli, tmp_path):
    done = cli("run", job(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    # One group of two copies reads all samples: four steps in an epoch.
    assert "8 steps" in done.stdout
    lines = [line.split() for line in (tmp_path / "runs" / "outside" / "lines.txt").read_text().splitlines()]
    rates = [float(value) for _, name, value in lines if name == "lr"]
    assert rates == pytest.approx([0.1, 0.05, 0.0, 0.05] * 2)
    assert "verified" not in done.stderr


def test_its_source_is_read(cli, tmp_path):
    for name, numbers in (("a", 40), ("b", 24)):
        (np.arange(numbers, dtype=np.float32) / numbers).tofile(tmp_path / f"{name}.frames")
    done = cli("run", job(tmp_path, data=frames(numbers=4)))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 steps" in done.stdout
    assert "samples  16" in cli("data", "inspect", job(tmp_path, data=frames(numbers=4))).stdout
    wrong = cli("data", "index", job(tmp_path, data=frames(numbers=5)))
    assert "b.frames: has 16 bytes more than whole frames" in wrong.stderr


def copies(**args):
    return {"name": "copies", "args": args}


def rounded(**args):
    return {"codec": {"name": "rounded", "args": args}}


def lines(**args):
    return {"trackers": [{"name": "lines", "args": args}]}


def frames(**args):
    return {"source": "frames", "source_args": args, "files": "*.frames"}


def queue(**settings):
    return {"queue": settings}


@pytest.mark.parametrize(
    ("changes", "path", "message", "hint"),
    [
        ({"strategy": copies(copied=2)}, "strategy.args.copied", "not a known field", "'copies'"),
        ({"strategy": copies(copies=0)}, "strategy.args.copies", "must be at least 1", ""),
        ({"allreduce": rounded(to="fp8")}, "allreduce.codec.args.to", "must be one of", ""),
        ({"lr": {"decay": "triangle"}}, "lr.decay_args.period", "is required", ""),
        (
            {"lr": {"decay": "cosine", "decay_args": {"period": 2}}},
            "lr.decay_args.period", "not a known field", "decay: triangle",
        ),
        ({"metrics": lines(digits=99)}, "metrics.trackers.0.args.digits", "at most 17", ""),
        ({"data": frames(number=4)}, "data.source_args.number", "not a known field", "numbers"),
        ({"launch": queue(per_nod=2)}, "launch.queue.per_nod", "not a known field", "per_node"),
        ({"launch": queue(options=["--array=3"])}, "launch.queue.options", "submits a job array", "queue-"),
        (
            {"launch": {"launcher": "queue", "num_ranks": 4, "elastic": {"min_ranks": 2}}},
            "launch.elastic", "is not for Outside Queue", "launch.queue.requeue",
        ),
        ({"train": {"compile": {}}}, "train.compile", "copies are not compiled", "leave it out"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_as_those_of_rows_of_ours(cli, tmp_path, changes, path, message, hint):
    done = cli("config", "validate", job(tmp_path, **changes))

    assert done.returncode == 2
    assert path in done.stderr
    assert message in done.stderr
    assert hint in done.stderr


def test_a_framework_refuses_what_it_declares(cli, tmp_path):
    numpy = {"framework": "outside_numpy", "strategy": "allreduce", "allreduce": {}, "train": {"compile": {}}}
    done = cli("config", "validate", job(tmp_path, **numpy))

    assert "is not supported with framework: outside_numpy: NumPy is not compiled" in done.stderr
    assert "refuses train.compile: NumPy is not compiled" in cli("frameworks").stdout


def test_the_schema_for_editors_contains_it(cli):
    schema = json.loads(cli("config", "schema").stdout)
    validator = jsonschema.Draft202012Validator(schema)

    def is_valid(**changes):
        return not list(validator.iter_errors({"name": "j", "task": "t", **changes}))

    assert is_valid(strategy={"name": "copies", "args": {"copies": 2}})
    assert not is_valid(strategy={"name": "copies", "args": {"copies": 0}})
    assert is_valid(launch={"queue": {"ranks_per_node": 2}})
    assert not is_valid(launch={"queue": {"ranks_per_node": 0}})
    assert is_valid(data=frames(numbers=4))
    assert not is_valid(data=frames(numbers=0))
    assert not is_valid(lr={"decay": "triangle", "decay_args": {"low": 2}})


def test_its_memory_is_planned(cli, tmp_path):
    done = cli("plan", job(tmp_path), "--memory")

    assert any(line.split()[:1] == ["copies"] for line in done.stdout.splitlines()), done.stdout + done.stderr


def test_its_scheduler_plans_a_submission_and_a_start_in_an_allocation(cli, tmp_path):
    settings = {"launcher": "queue", "num_ranks": 4, "queue": {"ranks_per_node": 2, "options": ["--night"]}}
    done = cli("run", job(tmp_path, launch=settings), "--dry-run")

    assert done.returncode == 0, done.stderr
    assert "oq-submit --ranks 4 --per-node 2 --night" in done.stdout
    alone = cli("run", job(tmp_path, launch={"launcher": "queue-allocation"}), "--dry-run")
    assert "this process has no Outside Queue allocation" in alone.stderr
    (tmp_path / "hosts").write_text("node1\nnode1\nnode2\nnode2\n")
    inside = cli(
        "run", job(tmp_path, launch={"launcher": "queue-allocation", "controller": "gloo"}), "--dry-run",
        OQ_JOB="7", OQ_HOSTFILE=str(tmp_path / "hosts"),
    )  # fmt: skip
    assert "node1:2,node2:2" in inside.stdout, inside.stderr


def test_its_scheduler_runs_a_job_to_its_end(cli, tmp_path):
    outside_queue.install(tmp_path / "bin")
    (tmp_path / "queue").mkdir()
    env = environment()
    env = {
        outside_queue.STATE: str(tmp_path / "queue"),
        "PATH": f"{tmp_path / 'bin'}:{env['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    launch = {**JOB["launch"], "launcher": "queue"}

    done = cli("run", job(tmp_path, launch=launch), "--run-id", "1", **env)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained outside: 2 epochs, 8 steps" in done.stdout
    assert "succeeded" in cli("status", "outside-1", **env).stdout


def test_ranks_need_no_package_of_a_launcher_that_starts_others(cli, tmp_path):
    """Sections of other packages that a job does not set are not passed to ranks."""
    shown = cli("render", job(tmp_path, strategy="allreduce", allreduce={}), "--launcher", "horovodrun")
    assert '"slurm": {' in shown.stdout
    assert '"queue": {' not in shown.stdout
