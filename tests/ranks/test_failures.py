"""Whatever goes wrong on a rank ends the job with one readable error and the right exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from support.launching import BIN, PROGRAMS, TIMEOUT_S, cli, environment, mostly, write_job
from support.running import Running, launched

from horovod_train.checkpoint.store import list_checkpoints

pytestmark = pytest.mark.ranks
TASKS = {"numpy": PROGRAMS / "quick_tasks.py", "torch": PROGRAMS / "tasks.py"}


def failing(folder: Path, how: str, rank: int, controller: str = "mpi", framework: str = "numpy", **sections):
    return write_job(
        folder / "job.yaml",
        framework=framework,
        task=f"{TASKS[framework]}:Failing",
        task_args={"notes": str(folder), "how": how, "rank": rank},
        run_dir=str(folder / "runs"),
        train={"epochs": 5, "batch_size_per_rank": 4},
        launch={"num_ranks": 2, "controller": controller},
        **sections,
    )


def test_an_error_in_the_task_on_one_rank_names_rank_host_and_cause_once(tmp_path, controller):
    done = cli("run", str(failing(tmp_path, "raise", 1, controller)), cwd=tmp_path, check=False)

    assert done.returncode == 1
    assert f"rank 1 on {os.uname().nodename}: ValueError: label 11 is out of range" in done.stderr
    assert (done.stdout + done.stderr).count("Traceback") == 1
    assert 'raise ValueError("label 11 is out of range")' in done.stderr
    assert "reading shard 17 ..." in done.stdout
    assert "@horovod-train" not in done.stdout


def test_the_same_error_on_all_ranks_is_told_once(tmp_path):
    done = cli("run", str(failing(tmp_path, "in the constructor", -1)), cwd=tmp_path, check=False)

    assert done.returncode == 1
    assert "ValueError: no such data set" in done.stderr
    assert (done.stdout + done.stderr).count("Traceback") == 1


@pytest.mark.parametrize("how", ["sys.exit", "os._exit", "interrupt"])
def test_an_end_that_is_no_error_is_explained(tmp_path, controller, how):
    done = cli("run", str(failing(tmp_path, how, 1, controller)), cwd=tmp_path, check=False)

    code, says = {
        "sys.exit": (2, "the task ended this rank with sys.exit(0) before training was done"),
        "os._exit": (1, "failed as a consequence: a collective failed because another rank exited"),
        "interrupt": (130, "rank 1 on .*: interrupted by SIGINT"),
    }[how]
    assert done.returncode == code, done.stderr
    assert re.search(says if how == "interrupt" else re.escape(says), done.stderr)
    assert "Traceback" not in done.stdout + done.stderr


def test_an_end_of_all_ranks_with_code_0_is_no_success(tmp_path):
    done = cli("run", str(failing(tmp_path, "os._exit", -1)), cwd=tmp_path, check=False)

    assert done.returncode == 1
    assert "the ranks ended with exit code 0 before training was done" in done.stderr


@mostly("mpi")
def test_a_loss_that_is_not_a_number_ends_with_code_3_and_names_the_rank(tmp_path, controller):
    done = cli("run", str(failing(tmp_path, "nan", 1, controller)), cwd=tmp_path, check=False)

    assert done.returncode == 3
    assert "step 3: the loss is nan because of rank 1" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_loss_that_is_not_a_number_can_be_skipped(tmp_path):
    path = failing(tmp_path, "nan", 1, health={"non_finite": "skip"})

    done = cli("run", str(path), cwd=tmp_path)

    assert "trained test" in done.stdout


def test_ranks_that_drift_apart_are_noticed(tmp_path):
    path = failing(tmp_path, "drift", 1, health={"sync_check_every_steps": 2})

    done = cli("run", str(path), cwd=tmp_path, check=False)

    assert done.returncode == 1
    assert "ranks differ after step 4" in done.stderr
    assert "rank 0 against rank 1, in 1 of 5 arrays, first model.weight" in done.stderr


def test_ranks_that_have_drifted_apart_are_not_saved(tmp_path):
    path = failing(tmp_path, "drift", 1, checkpoint={"every": "2 steps"})

    done = cli("run", str(path), cwd=tmp_path, check=False)

    assert done.returncode == 1
    assert "ranks differ after step 4, which is therefore not saved" in done.stderr
    assert [found.step for found in list_checkpoints(tmp_path / "runs" / "test" / "checkpoints")] == [2]


@mostly("gloo")
def test_a_killed_rank_is_told_from_one_that_says_why(tmp_path, controller):
    path = write_job(
        tmp_path / "job.yaml",
        framework="numpy",
        task=f"{TASKS['numpy']}:Noted",
        task_args={"notes": str(tmp_path), "kill": "1:4"},
        run_dir=str(tmp_path / "runs"),
        train={"epochs": 5, "batch_size_per_rank": 4},
        launch={"num_ranks": 2, "controller": controller},
    )

    done = cli("run", str(path), cwd=tmp_path, check=False)

    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "was killed by signal 9, before it could say why" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("allreduce", "fsdp"))]
)
@mostly("gloo")
def test_a_rank_that_stays_away_is_named_while_it_does_and_in_the_end(tmp_path, controller, strategy):
    health = {"stall_warning_s": 2.0, "stall_shutdown_s": 8.0}
    path = failing(tmp_path, "stay away", 1, controller, "torch", health=health, strategy=strategy)
    with launched(tmp_path, path) as process:
        said, waiting_s = set(), {"0": 0.0, "1": 0.0}
        while process.poll() is None:
            said |= {json.loads(file.read_text())["message"] for file in tmp_path.rglob("*/state.json")}
            for rank, seconds in waiting_now(tmp_path):
                waiting_s[rank] = max(waiting_s[rank], seconds)
            time.sleep(0.2)
        output, _ = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == 1
    assert any("rank 1 did not join a collective" in text for text in said), said
    error = output[output.rindex("error: ") :]
    assert "rank 1 did not join a collective that the others wait in" in error
    assert "rank-1.log" in error
    assert waiting_s["0"] > 4.0, "the other one has waited for it, and has said so"
    assert waiting_s["1"] < 2.0


def waiting_now(folder):
    """For how long each rank waits in a collective, by its own word."""
    for file in folder.rglob("prometheus-targets.json"):
        for group in json.loads(file.read_text()):
            with suppress(OSError):
                url = f"http://{group['targets'][0]}/metrics?name[]=horovod_train_waiting_now_seconds"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    found = re.search(r'rank="(\d)",.*} (\S+)', answer.read().decode())
                yield found[1], float(found[2])


def test_a_task_without_its_methods_is_a_user_error(tmp_path):
    (tmp_path / "mine.py").write_text("class Task:\n    def model(self): ...\n")
    fields = {"framework": "numpy", "task": "mine.py:Task", "launch": {"num_ranks": 2}}
    path = write_job(tmp_path / "job.yaml", **fields)

    done = cli("run", str(path), cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert "lacks train_data(), gradient(), metrics()" in done.stderr


def test_a_run_killed_with_9_takes_its_ranks_along(tmp_path, controller):
    path = write_job(
        tmp_path / "job.yaml",
        framework="numpy",
        task=f"{TASKS['numpy']}:Noted",
        task_args={"notes": str(tmp_path), "pause_s": 0.2},
        run_dir=str(tmp_path / "runs"),
        train={"epochs": 500, "batch_size_per_rank": 4},
        launch={"num_ranks": 2, "controller": controller},
    )
    running = Running(tmp_path, path, 2)

    running.process.kill()

    assert running.end(within_s=20)[0] == -9


class TestTheWorld:
    """`horovodrun -np N horovod-train worker job.yaml`, typed by hand."""

    def by_hand(self, folder, ranks, job, *flags):
        return subprocess.run(
            [str(BIN / "horovodrun"), *flags, "-np", str(ranks), str(BIN / "horovod-train"), "worker", job],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    @mostly("mpi")
    def test_trains_as_run_does(self, tmp_path, controller):
        path = failing(tmp_path, "not at all", 0)

        done = self.by_hand(tmp_path, 2, path, f"--{controller}")

        assert done.returncode == 0, done.stderr
        assert "trained test: 5 epochs, 40 steps" in done.stdout

    @mostly("gloo")
    def test_is_refused_when_it_is_not_the_one_asked_for(self, tmp_path, controller):
        done = self.by_hand(tmp_path, 3, failing(tmp_path, "not at all", 0), f"--{controller}")

        assert done.returncode != 0
        assert "the job asks for 2 ranks, but this world has 3" in done.stdout

    def test_is_refused_when_the_worker_was_started_alone(self, tmp_path):
        done = cli("worker", str(failing(tmp_path, "not at all", 0)), cwd=tmp_path, check=False)

        assert done.returncode == 1
        assert "the job asks for 2 ranks, but this world has 1" in done.stdout
