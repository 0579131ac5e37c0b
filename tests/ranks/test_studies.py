"""Studies of real jobs: a study that is killed again and again has the table of an undisturbed one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from dataclasses import asdict

import pytest
from support.launching import BIN, PROGRAMS, TIMEOUT_S, cli, environment, write_job

from horovod_train.plugins.study.results import read_study

pytestmark = pytest.mark.ranks
OTHERWISE = {"seconds", "job_digest"}
"""Fields that depend on the folder, which is an argument of the task, and on time."""


def write(folder, task, **sections):
    folder.mkdir()
    return write_job(
        folder / "job.yaml",
        **{
            "task": task,
            "run_dir": str(folder / "runs"),
            "train": {"epochs": 2, "batch_size_per_rank": 4},
            "lr": {"base_lr": 0.01, "reference_batch_size": 4},
            "checkpoint": {"every": [1, "5 steps"]},
            **sections,
        },
    )


def command(folder, *arguments):
    return [str(BIN / "horovod-train"), "study", str(folder / "job.yaml"), *arguments]


def killed_after(folder, seconds, *arguments):
    """Start a study, and kill it after some time; return whether it had ended."""
    process = subprocess.Popen(
        command(folder, *arguments), cwd=folder, env=environment(XDG_STATE_HOME=str(folder / "state")),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
        return False
    return True


def study_of(folder, *arguments):
    """Run a study to its end; return the numbers of its results, without times."""
    cli("study", str(folder / "job.yaml"), *arguments, cwd=folder, XDG_STATE_HOME=str(folder / "state"))
    study = read_study(folder / "runs" / "test" / "study")
    return {
        name: {key: value for key, value in asdict(result).items() if key not in OTHERWISE}
        for name, result in study.results.items()
    }


def quick(folder):
    tasks, notes = f"{PROGRAMS / 'quick_tasks.py'}:Noted", folder.with_name(f"{folder.name}-notes")
    notes.mkdir()
    return write(
        folder, tasks, framework="numpy", task_args={"notes": str(notes), "num_samples": 60, "pause_s": 0.02}
    )


def test_a_study_that_is_killed_continues_and_has_the_same_numbers(tmp_path):
    arguments = ("--ranks", "1,2", "--seeds", "1", "--policies", "linear")
    quick(tmp_path / "whole")
    whole = study_of(tmp_path / "whole", *arguments)
    quick(tmp_path / "killed")
    moments = random.Random(1)
    for _ in range(2):
        killed_after(tmp_path / "killed", moments.uniform(1.0, 4.0), *arguments)
    killed = study_of(tmp_path / "killed", *arguments)

    assert sorted(whole) == ["linear-r1-s0", "linear-r2-s0"]
    assert killed == whole
    table = (tmp_path / "killed" / "runs" / "test" / "study" / "table.md").read_text()
    assert "| linear | 2 | 8 |" in table
    warned = cli("plan", "job.yaml", "-n", "4", cwd=tmp_path / "killed")
    assert "has not examined a global batch of 16 with this policy; its largest is 8" in warned.stderr


@pytest.mark.campaign
def test_ten_kills_of_a_study_of_digits_change_no_number(tmp_path):
    arguments = ("--ranks", "1,2,4", "--seeds", "2", "--policies", "linear,adascale")
    sections = {
        "train": {"epochs": 2, "batch_size_per_rank": 32},
        "lr": {"base_lr": 0.015, "reference_batch_size": 32},
        "launch": {"threads_per_rank": 1},
    }
    for name in ("whole", "killed"):
        write(tmp_path / name, "digits", **sections)
    begun_s = time.monotonic()
    whole = study_of(tmp_path / "whole", *arguments)
    length_s = time.monotonic() - begun_s
    moments = random.Random(2)
    for _ in range(10):
        killed_after(tmp_path / "killed", moments.uniform(0.0, length_s / 5), *arguments)

    assert study_of(tmp_path / "killed", *arguments) == whole


@pytest.mark.campaign
def test_the_critical_batch_of_a_noisy_quadratic_is_that_of_the_closed_form(tmp_path):
    """E|w|^2 after n steps follows v -> (1 - a)^2 v + a^2 S / b, with the rate a = base x b / 8."""
    base, noise, dimension, distance = 0.02, 1.0, 50, 1.0
    folder = tmp_path / "quadratic"
    write(
        folder,
        f"{PROGRAMS / 'quadratic.py'}:Quadratic",
        task_args={"dimension": dimension, "noise": noise, "distance": distance},
        train={"epochs": 2, "batch_size_per_rank": 8, "max_steps": None},
        lr={"base_lr": base, "reference_batch_size": 8},
        launch={"num_ranks": 1, "threads_per_rank": 1},
        checkpoint={},
    )
    arguments = ("--critical-batch", "--branch-epochs", "1", "--branch-length", "0.25", "--seeds", "4")
    cli("study", "job.yaml", *arguments, "--multiples", "1,2,4,8,16,32", cwd=folder,
        XDG_STATE_HOME=str(folder / "state"))  # fmt: skip
    study = read_study(folder / "runs" / "test" / "study")

    start = study.results["critical-base"].evaluations[0][1]["distance"]
    steps_at_8, covariance = 0.25 * 4096 / 8, noise**2 * dimension

    def expected(batch):
        rate = base * batch / 8
        decay = (1 - rate) ** 2
        power = decay ** (steps_at_8 * 8 / batch)
        fixed = rate**2 * covariance / batch / (1 - decay)
        return (power * start + fixed * (1 - power)) / 2

    batches = [8 * 2 ** (n / 100) for n in range(501)]
    exact = next((b for b in batches if expected(b) > 1.01 * expected(8)), None)
    html = json.loads((folder / "runs" / "test" / "study" / "table.json").read_text())
    ((_, found, _),) = html["sections"][0]["blocks"][1]["rows"]
    assert exact is not None
    assert float(found) == pytest.approx(exact, rel=0.25)
