"""A real Grid Engine with two nodes: jobs that wait, train, are cancelled, run out of time and go on."""

from __future__ import annotations

import json
import time

import pytest
from support.checkpoints import arrays, newest
from support.cluster import cluster
from support.gridengine import gridengine_on
from support.launching import BIN, PROGRAMS, TIMEOUT_S, write_job
from support.mpis import each, programs_of

from horovod_train.checkpoint.store import list_checkpoints

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def gridengine(tmp_path_factory):
    hosts = cluster(tmp_path_factory.mktemp("cluster"), ("node1", "node2"))
    with hosts as hosts, gridengine_on(hosts) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_runs_afterwards(gridengine):
    yield
    deadline = time.monotonic() + 20
    while (left := still_there(gridengine)) and time.monotonic() < deadline:
        time.sleep(0.1)
    gridengine.ask("qdel", "-u", "root", check=False)
    assert left == []


def still_there(gridengine):
    ranks = [text for text in gridengine.cluster.leftovers() if "horovod_train" in text]
    return ranks or gridengine.ask("qstat", "-u", "*").splitlines()


@pytest.fixture
def ask(gridengine, tmp_path):
    """Call horovod-train on the login host; returns its output and exit code."""

    def call(*arguments, check=True, programs=BIN):
        variables = {**gridengine.variables, "XDG_STATE_HOME": str(tmp_path / "state")}
        command = [str(programs / "horovod-train"), *arguments]
        done = gridengine.cluster.on_login(*command, cwd=tmp_path, env=variables)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return call


def job(folder, *, options=(), name="slow", **sections):
    """A job of two ranks, one on each node, whose ranks each write a file for each step."""
    gridengine = {"parallel_environment": "mpi", "options": list(options)}
    return write_job(
        folder / f"{name}.yaml",
        **{
            "name": name,
            "run_dir": str(folder / "runs"),
            "task": f"{PROGRAMS / 'tasks.py'}:Noted",
            "task_args": {"notes": str(folder), "pause_s": 0.05},
            "train": {"epochs": 500, "batch_size_per_rank": 4},
            "launch": {"launcher": "gridengine", "num_ranks": 2, "gridengine": gridengine, "grace_s": 15.0},
            **sections,
        },
    )


def wait_for_ranks(folder, num_ranks=2):
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(folder.glob("rank-*.txt"))) < num_ranks:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@each(["openmpi4", "openmpi5", "mpich4", "mpich5", "intel"], in_each_run=["openmpi4", "mpich5"])
def test_a_drained_job_has_saved_on_two_nodes(tmp_path, ask, mpi):
    programs = programs_of(mpi)
    job_id = ask("submit", str(job(tmp_path)), programs=programs).stdout.strip()
    wait_for_ranks(tmp_path)
    status = json.loads(ask("status", job_id, "--json", programs=programs).stdout)
    ask("drain", job_id, programs=programs)
    done = ask("wait", job_id, check=False, programs=programs)

    assert status["state"] == "running"
    assert done.returncode == 75, done.stdout + done.stderr + ask("logs", job_id).stdout[-3000:]
    assert "everything is saved at step" in ask("status", job_id, check=False).stdout
    assert list_checkpoints(tmp_path / "runs" / "slow" / "checkpoints")


def test_a_cancelled_job_has_saved_and_one_that_waits_leaves_the_queue(tmp_path, ask):
    running = ask("submit", str(job(tmp_path))).stdout.strip()
    wait_for_ranks(tmp_path)
    waiting = ask("submit", str(job(tmp_path, name="waits", options=["-h"]))).stdout.strip()
    status = ask("status", waiting).stdout
    ask("cancel", waiting)
    ask("cancel", running)

    assert "in Grid Engine's queue: state hqw" in status
    assert ask("wait", waiting, check=False).stdout.startswith(f"{waiting}: cancelled")
    assert ask("wait", running, check=False).returncode == 143
    assert list_checkpoints(tmp_path / "runs" / "slow" / "checkpoints")


def test_a_job_whose_time_is_over_saves_is_queued_again_and_ends_as_if_undisturbed(tmp_path, ask):
    train = {"epochs": 12, "batch_size_per_rank": 4}
    checkpoint = {"every_epochs": None, "keep_last": 1}
    undisturbed = job(tmp_path, name="undisturbed", train=train, checkpoint=checkpoint)
    ask("run", str(undisturbed), "--set", "task_args.pause_s=0.0")
    for file in tmp_path.glob("rank-*.txt"):
        file.unlink()
    path = job(tmp_path, train=train, checkpoint=checkpoint, options=["-l h_rt=0:0:30"])
    done = ask("run", str(path), "--set", "launch.grace_s=12", "--set", "task_args.pause_s=0.3", check=False)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "time limit reached, requeued" in done.stdout
    assert "resumed from" in done.stdout
    assert arrays(newest(tmp_path, "slow")) == arrays(newest(tmp_path, "undisturbed"))


def test_the_words_of_grid_engine_are_shown(tmp_path, ask):
    refused = ask("submit", str(job(tmp_path, options=["-q nowhere.q"])), check=False)

    assert refused.returncode == 1
    assert 'unknown queue "nowhere.q"' in refused.stderr


def test_a_process_outside_of_a_job_has_no_allocation(tmp_path, ask):
    path = job(tmp_path)

    done = ask("run", str(path), "--launcher", "gridengine-allocation", check=False)

    assert done.returncode == 1
    assert "has no Grid Engine allocation" in done.stderr
