"""`horovod-train run`: what a person sees, and what training offers besides training."""

from __future__ import annotations

import os
import pty
import re
import subprocess

import psutil
import pytest
from support.launching import BIN, PROGRAMS, TIMEOUT_S, cli, environment, write_job
from support.running import Running

pytestmark = pytest.mark.ranks
TASK = f"{PROGRAMS / 'quick_tasks.py'}:Noted"


def job(folder, **sections):
    return write_job(
        folder / "job.yaml",
        run_dir=str(folder / "runs"),
        **{
            "framework": "numpy",
            "task": TASK,
            "task_args": {"notes": str(folder)},
            "launch": {"num_ranks": 2},
            **sections,
        },
    )


def test_a_terminal_shows_a_progress_bar_with_the_time_left(tmp_path):
    path = job(
        tmp_path,
        task_args={"notes": str(tmp_path), "pause_s": 0.05},
        train={"epochs": 8, "batch_size_per_rank": 4},
    )
    terminal, inside = pty.openpty()
    with subprocess.Popen(
        [str(BIN / "horovod-train"), "run", str(path)],
        cwd=tmp_path,
        env=environment(TERM="xterm-256color", COLUMNS="120"),
        stdin=inside,
        stdout=inside,
        stderr=inside,
    ) as process:
        os.close(inside)
        seen = b""
        while True:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
            seen += piece
        assert process.wait(TIMEOUT_S) == 0, seen.decode()
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())

    assert "━" in text
    assert re.search(r"epoch \d/8  step \d+/64  \d+ %  loss .* samples/s  ETA \d+ s", text)
    assert "trained test: 8 epochs, 64 steps" in text


def test_all_ranks_stop_early_together_and_a_resumed_job_stays_stopped(tmp_path):
    path = job(
        tmp_path,
        train={"epochs": 50, "batch_size_per_rank": 4},
        lr={"base_lr": 1e-9},
        evaluation={"early_stopping": {"metric": "loss", "mode": "min", "patience": 2, "min_delta": 1.0}},
    )

    done = cli("run", str(path), cwd=tmp_path)
    again = cli("run", str(path), cwd=tmp_path)

    # The first evaluation is the best one, two more do not improve on it.
    assert "stopping early: loss did not improve in 2 evaluations" in done.stdout
    assert "trained test: 3 epochs, 24 steps" in done.stdout
    assert "trained test: 3 epochs, 24 steps" in again.stdout


def test_a_limit_of_steps_ends_in_mid_epoch_and_more_steps_go_on(tmp_path):
    path = job(tmp_path, train={"epochs": 3, "max_steps": 5, "batch_size_per_rank": 4})

    cut = cli("run", str(path), cwd=tmp_path)
    rest = cli("run", str(path), "--set", "train.max_steps=null", cwd=tmp_path)

    assert "5 steps" in cut.stdout
    assert "resumed from step-000000000005" in rest.stdout
    assert "trained test: 3 epochs, 24 steps" in rest.stdout


def test_another_order_of_samples_cannot_be_resumed_in_mid_epoch(tmp_path):
    path = job(tmp_path, train={"epochs": 3, "max_steps": 5, "batch_size_per_rank": 4})
    cli("run", str(path), cwd=tmp_path)

    done = cli("run", str(path), "--set", "train.seed=9", cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert "seed was 0 and is 9" in done.stderr


def test_another_model_cannot_take_over_a_checkpoint(tmp_path):
    path = job(tmp_path, train={"epochs": 1, "batch_size_per_rank": 4})
    cli("run", str(path), cwd=tmp_path)

    another = TASK.replace("Noted", "Wide")
    done = cli("run", str(path), "--set", f"task={another}", cwd=tmp_path, check=False)

    assert done.returncode == 1
    assert "the checkpoint belongs to another model" in done.stderr


def test_one_rank_trains_without_horovod(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['horovod'] = None\n")

    done = cli("run", "digits", "-n", "1", "--set", "train.epochs=1", cwd=tmp_path, PYTHONPATH=str(tmp_path))

    assert "on 1 rank, global batch 32" in done.stdout


def test_two_runs_of_one_name_do_not_get_into_each_others_way(tmp_path):
    path = job(
        tmp_path,
        task_args={"notes": str(tmp_path), "pause_s": 0.1},
        train={"epochs": 500, "batch_size_per_rank": 4},
        launch={"num_ranks": 1},
    )
    with subprocess.Popen(
        [str(BIN / "horovod-train"), "run", str(path)],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
    ) as first:
        for line in first.stdout:
            if b"epoch 1:" in line:
                break
        second = cli("run", str(path), cwd=tmp_path, check=False)
        first.terminate()
        first.communicate(timeout=TIMEOUT_S)

    assert second.returncode == 1
    assert "another run is writing checkpoints" in second.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_that_a_task_leaves_behind_does_not_keep_the_run_from_ending(tmp_path, ranks):
    path = job(
        tmp_path,
        task=TASK.replace("Noted", "Leaving"),
        train={"epochs": 1, "batch_size_per_rank": 4},
        launch={"num_ranks": ranks},
    )

    done = cli("run", str(path), cwd=tmp_path)

    assert "trained test" in done.stdout


def test_flags_win_over_the_environment_in_the_ranks_too(tmp_path):
    path = job(tmp_path, train={"batch_size_per_rank": 4})
    environ = {"HOROVOD_TRAIN__TRAIN__EPOCHS": "9", "HOROVOD_TRAIN__LAUNCH__NUM_RANKS": "3"}

    done = cli("run", str(path), "-n", "2", "--set", "train.epochs=1", cwd=tmp_path, **environ)

    assert "trained test: 1 epochs, 8 steps" in done.stdout


def test_a_misspelled_metric_is_an_error_and_not_ignored(tmp_path):
    path = job(
        tmp_path,
        train={"epochs": 1, "batch_size_per_rank": 4},
        checkpoint={"best": {"metric": "los", "mode": "min"}},
    )

    done = cli("run", str(path), cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert "checkpoint.best.metric: the evaluation has no metric 'los'; it has loss" in done.stderr
    assert "did you mean 'loss'?" in done.stderr


def test_ranks_that_make_different_models_are_told_before_they_wait_for_each_other(tmp_path):
    path = job(tmp_path, task=TASK.replace("Noted", "Differing"), train={"batch_size_per_rank": 4})

    done = cli("run", str(path), cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert "have different models" in done.stderr


def test_ranks_that_have_the_samples_in_another_order_are_told_before_the_first_step(tmp_path):
    path = job(tmp_path, task=TASK.replace("Noted", "Unsorted"), train={"batch_size_per_rank": 4})

    done = cli("run", str(path), cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert "the training data differ between ranks: a batch of samples [0, 8, 17, 25," in done.stderr
    assert "on rank 1 is not that of rank 0" in done.stderr
    assert "sort the result of os.listdir and glob" in done.stderr


@pytest.mark.parametrize(
    ("launcher", "controller"),
    [
        ("horovodrun", "mpi"),
        ("horovodrun", "gloo"),
        pytest.param("mpirun", "mpi", marks=pytest.mark.campaign),
    ],
)
def test_a_run_on_one_machine_listens_on_loopback_only(tmp_path, launcher, controller):
    path = job(
        tmp_path,
        framework="torch",
        task=f"{PROGRAMS / 'tasks.py'}:Noted",
        task_args={"notes": str(tmp_path), "pause_s": 0.2},
        launch={"num_ranks": 2, "launcher": launcher, "controller": controller},
    )
    run = Running(tmp_path, path, 2)
    listening = {
        (process.name(), socket.laddr.ip)
        for process in (psutil.Process(run.process.pid), *run.all)
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }
    libraries = [process.environ().get("LD_PRELOAD", "") for process in run.ranks]
    run.process.terminate()
    run.end(within_s=5)

    assert {name for name, _ in listening} >= {"horovodrun" if controller == "gloo" else "orterun_wrapper"}
    assert {address for _, address in listening} <= {"127.0.0.1", "::1"}
    assert libraries == ["", ""]  # what a task listens on is its own affair


def test_a_launcher_from_another_package_is_chosen_by_its_name(tmp_path):
    (tmp_path / "site_launcher.py").write_text(
        "from horovod_train.launch.base import LaunchPlan\n"
        "from horovod_train.launch.launchers.hosts import SupervisedLauncher\n"
        "class SiteLauncher(SupervisedLauncher):\n"
        "    def plan(self, request):\n"
        "        return LaunchPlan(('nice', request.rank_command), {'SITE': 'here'})\n"
    )
    installed = tmp_path / "site_launcher-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: site_launcher\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[horovod_train.launchers]\nsite = site_launcher:SiteLauncher\n"
    )
    path = write_job(tmp_path / "job.yaml", task="digits", train={"epochs": 1}, launch={"launcher": "site"})
    state = {"PYTHONPATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}

    plan = cli("run", str(path), "--dry-run", cwd=tmp_path, **state)
    job_id = cli("submit", str(path), cwd=tmp_path, **state).stdout.strip()
    waited = cli("wait", job_id, cwd=tmp_path, **state)

    assert "SITE=here" in plan.stdout
    assert "nice" in plan.stdout
    assert waited.stdout == f"{job_id}: succeeded\n"
    assert "trained test" in cli("logs", job_id, cwd=tmp_path, **state).stdout
