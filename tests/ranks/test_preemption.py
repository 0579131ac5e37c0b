"""Asked to leave, by whatever way: saved, left with 75, nobody left behind, and nothing lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest
from support.checkpoints import arrays, newest
from support.launching import (
    BIN,
    PROGRAMS,
    TIMEOUT_S,
    bin_of,
    cli,
    environment,
    mostly,
    name_of,
    variables_of,
    write_job,
)
from support.matrix import COLUMNS
from support.once import once
from support.running import Running, launched

from horovod_train.checkpoint.store import list_checkpoints

pytestmark = pytest.mark.ranks
LAUNCHES = {
    "alone": {"num_ranks": 1},
    "horovodrun over mpi": {"num_ranks": 2, "controller": "mpi"},
    "horovodrun over gloo": {"num_ranks": 2, "controller": "gloo"},
    "mpirun": {"num_ranks": 2, "launcher": "mpirun"},
}
# Real Horovod, real gradients and loader processes; what launchers and signals do is the same without.
CASES = [
    *(("numpy", launch) for launch in LAUNCHES),
    ("torch", "horovodrun over mpi"),
    ("torch", "horovodrun over gloo"),
]
STRATEGIES = ("adasum", "ddp", "deepspeed", "fsdp", "local_sgd", "pipeline", "zero")
ASKED = [
    *((framework, launch, number) for framework, launch in CASES for number in range(20)),
    *(
        (f"torch with {strategy}", "horovodrun over mpi", number)
        for strategy in STRATEGIES
        for number in (1, 5)
    ),
]
AT_ONCE = [("numpy", launch, 0) for launch in LAUNCHES]
STRATEGY_ARGS = {"local_sgd": {"every_steps": 7}}
TASKS = {"numpy": "quick_tasks.py", "torch": "tasks.py"}
EPOCHS = 30


def job(folder, name, launch, pause_s, framework="numpy", num_workers=1):
    framework, _, strategy = framework.partition(" with ")
    path = folder / f"{name}.yaml"
    return write_job(
        path,
        name=name,
        framework=framework,
        task=f"{PROGRAMS / TASKS[framework]}:Noted",
        task_args={"notes": str(folder), "pause_s": pause_s},
        run_dir=str(folder / "runs"),
        train={"epochs": EPOCHS, "batch_size_per_rank": 4},
        strategy={"name": strategy or "allreduce", "args": STRATEGY_ARGS.get(strategy, {})},
        optimizer={"name": "adam"} if framework == "torch" else {"args": {"momentum": 0.9}},
        data={"num_workers": num_workers if framework == "torch" else 0},
        checkpoint={"every": None, "keep_last": 100},
        launch={**launch, "grace_s": 10},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a job that nobody has asked to leave, by framework and number of ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")

    @once
    def train(framework, num_ranks):
        name = f"{framework.replace(' ', '-')}-{num_ranks}"
        launch = LAUNCHES["mpirun" if num_ranks > 1 else "alone"]
        cli("run", str(job(folder, name, launch, 0.0, framework, num_workers=0)), cwd=folder)
        return arrays(newest(folder, name))

    return train


@pytest.mark.parametrize(
    ("framework", "launch", "time_of_asking"),
    [pytest.param(*case, marks=[] if case in AT_ONCE else [pytest.mark.campaign]) for case in ASKED],
)
def test_a_run_that_is_asked_to_leave_loses_nothing(tmp_path, undisturbed, framework, launch, time_of_asking):
    num_ranks = LAUNCHES[launch]["num_ranks"]
    path = job(tmp_path, "j", LAUNCHES[launch], 0.02, framework)
    running = Running(tmp_path, path, num_ranks)
    time.sleep(0.07 * time_of_asking)

    running.process.send_signal(signal.SIGTERM)
    code, output = running.end()
    saved = len(list_checkpoints(tmp_path / "runs" / "j" / "checkpoints"))
    again = cli("run", str(path), "--set", "task_args.pause_s=0.0", cwd=tmp_path)

    assert code == 75, output
    assert "everything is saved at step" in output
    assert saved == 1
    assert "resumed from" in again.stdout
    assert arrays(newest(tmp_path, "j")) == undisturbed(framework, num_ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_one_rank_that_is_asked_takes_all_along(tmp_path, launch, number):
    num_ranks = LAUNCHES[launch]["num_ranks"]
    running = Running(tmp_path, job(tmp_path, "j", LAUNCHES[launch], pause_s=0.05), num_ranks)

    running.ranks[-1].send_signal(number)
    code, output = running.end()

    assert code == 75, output
    assert list_checkpoints(tmp_path / "runs" / "j" / "checkpoints")


@mostly("gloo")
def test_every_process_of_a_run_may_be_asked_at_once(tmp_path, controller):
    """Kubernetes and Slurm send SIGTERM to all there is, loader processes among it."""
    launch = {"num_ranks": 2, "controller": controller}
    running = Running(tmp_path, job(tmp_path, "j", launch, 0.05, "torch"), 2)
    children = [child for rank in running.ranks for child in rank.children(recursive=True)]
    family = [*running.ranks, *children]

    for process in family:
        process.send_signal(signal.SIGTERM)
    code, output = running.end()

    assert len(family) >= 4
    assert code == 75, output


def test_a_rank_that_does_not_come_to_the_end_of_its_step_is_killed_when_the_grace_is_over(tmp_path):
    path = job(tmp_path, "j", {"num_ranks": 2}, pause_s=600)
    path.write_text(path.read_text().replace("grace_s: 10", "grace_s: 2"))
    running = Running(tmp_path, path, 2)

    started = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    code, output = running.end()

    assert time.monotonic() - started < 10
    assert code == 143
    assert "stopped by signal 15, before the ranks had saved" in output


def test_the_second_ctrl_c_kills_at_once(tmp_path):
    running = Running(tmp_path, job(tmp_path, "j", {"num_ranks": 2}, pause_s=600), 2)

    started = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    running.process.send_signal(signal.SIGINT)
    code, _ = running.end()

    assert time.monotonic() - started < 8
    assert code == 130


def test_a_stop_before_training_has_begun_says_so(tmp_path):
    path = job(tmp_path, "j", {"num_ranks": 2}, 0.0, "torch")  # takes seconds to begin
    path.write_text(path.read_text().replace("grace_s: 10", "grace_s: 1"))
    with launched(tmp_path, path) as process:
        while not list((tmp_path / "runs").rglob("state.json")):
            time.sleep(0.01)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == 143, output
    assert "before the ranks had begun to train" in output


def test_the_grace_that_is_needed_is_told_when_it_is_not_given(tmp_path):
    path = job(tmp_path, "j", {"num_ranks": 1}, pause_s=0.3)
    text = path.read_text().replace("grace_s: 10", "grace_s: 0.1").replace("epochs: 30", "epochs: 1")
    path.write_text(text.replace("every: null", "every: 1 step"))

    done = cli("run", str(path), cwd=tmp_path)

    told = re.search(
        r"saving and exiting on preemption would take (.+) s, but launch.grace_s is "
        "0.1",
        done.stdout,
    )
    assert float(told[1]) >= 0.3  # a step takes that long on an idle machine, and longer on a busy one


@pytest.mark.campaign
@pytest.mark.parametrize("framework", [name for name in COLUMNS if name != "torch"])
def test_in_every_framework(tmp_path, framework):
    def described(name, pause_s):
        return write_job(
            tmp_path / f"{name}.yaml",
            name=name,
            framework=name_of(framework),
            task=f"frameworks.{name_of(framework)}_task:Task",
            task_args={"dropout": 0.25, "pause_s": pause_s},
            run_dir=str(tmp_path / "runs"),
            train={"epochs": 6, "batch_size_per_rank": 4},
            optimizer={"name": "adam"},
            lr={"base_lr": 0.01, "scaling": "none"},
            checkpoint={"every": None, "keep_last": 100},
            launch={"num_ranks": 2},
        )

    programs = bin_of(framework)
    env = {**variables_of(framework), "PYTHONPATH": str(PROGRAMS)}
    with subprocess.Popen(
        [str(programs / "horovod-train"), "run", str(described("asked", 0.1))],
        cwd=tmp_path,
        env=environment(programs=programs, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout:
            if "epoch 2: " in line:
                break
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    again = cli("run", str(described("asked", 0.0)), cwd=tmp_path, programs=programs, **env)
    cli("run", str(described("undisturbed", 0.0)), cwd=tmp_path, programs=programs, **env)

    assert process.returncode == 75, output
    assert "resumed from" in again.stdout
    assert arrays(newest(tmp_path, "asked")) == arrays(newest(tmp_path, "undisturbed"))


def test_a_launch_typed_by_hand_leaves_with_75_too(tmp_path):
    path = job(tmp_path, "j", {}, pause_s=0.05)
    process = subprocess.Popen(
        [
            str(BIN / "mpirun"),
            "--allow-run-as-root",
            "-np",
            "2",
            str(BIN / "horovod-train"),
            "worker",
            str(path),
        ],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while len(list(tmp_path.glob("rank-*.txt"))) < 2:
        time.sleep(0.05)

    os.kill(process.pid, signal.SIGUSR1)  # mpirun passes it on
    output, _ = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == 75, output
    assert "preempted; saved after step" in output
