"""Two nodes of a real Grid Engine, and of a PBS that behaves as OpenPBS: jobs wait, train, end and go on."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest
from support.checkpoints import arrays, newest
from support.cluster import cluster
from support.gridengine import GridEngine, gridengine_on
from support.launching import PLUGIN, PROGRAMS, write_job
from support.mpis import NAMES, programs_of
from support.pbs import Pbs, pbs_on
from support.waiting import wait_for_ranks

from horovod_train.checkpoint.store import list_checkpoints

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Dialect:
    """What a batch system calls what a test needs."""

    section: dict[str, object]
    held: str
    is_held: str
    time_limit: str
    unknown_queue: str
    refusal: str
    name: str


DIALECTS = {
    "gridengine": Dialect(
        {"parallel_environment": "mpi"}, "-h", "state hqw", "-l h_rt=0:1:0", "-q nowhere.q",
        'unknown queue "nowhere.q"', "Grid Engine",
    ),
    "pbs": Dialect(
        {"ranks_per_node": 1}, "-h", "state H", "-l walltime=00:01:00", "-q nowhere", "Unknown queue", "PBS"
    ),
}  # fmt: skip
STARTS = {"gridengine": gridengine_on, "pbs": pbs_on}


TORCH = {"framework": "torch", "task": f"{PROGRAMS / 'tasks.py'}:Noted"}


@pytest.fixture(scope="module", params=["gridengine", "pbs"])
def system(request, tmp_path_factory):
    hosts = cluster(tmp_path_factory.mktemp("cluster"), ("node1", "node2"))
    with hosts as hosts, STARTS[request.param](hosts) as made:
        yield made


@pytest.fixture
def name(system):
    return {GridEngine: "gridengine", Pbs: "pbs"}[type(system)]


@pytest.fixture
def dialect(name):
    return DIALECTS[name]


@pytest.fixture(autouse=True)
def nothing_runs_afterwards(system):
    yield
    deadline = time.monotonic() + 20
    while (left := still_there(system)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def still_there(system):
    ranks = [text for text in system.cluster.leftovers() if "horovod_train" in text]
    return ranks or system.ask("qstat", *(("-f",) if isinstance(system, Pbs) else ("-u", "*"))).splitlines()


@pytest.fixture
def ask(system, tmp_path):
    return system.cluster.cli(tmp_path, system.variables)


@pytest.fixture
def job(system, name, dialect, tmp_path):
    """Write a job of two ranks, one on each node, over sockets (TORCH: over MPI); each rank writes a file."""

    def write(*options, called="slow", **sections):
        launch = {
            "launcher": name, "num_ranks": 2, "grace_s": 12.0, "ssh": system.cluster.ssh,
            "env": {"PYTHONPATH": str(PLUGIN)},
            name: {**dialect.section, "options": [f"-v PYTHONPATH={PLUGIN}", *options]},
        }  # fmt: skip
        return str(
            write_job(
                tmp_path / f"{called}.yaml",
                **{
                    "name": called,
                    "run_dir": str(tmp_path / "runs"),
                    "framework": "numpy",
                    "task": f"{PROGRAMS / 'quick_tasks.py'}:Noted",
                    "task_args": {"notes": str(tmp_path), "pause_s": 0.05},
                    "train": {"epochs": 500, "batch_size_per_rank": 4},
                    "launch": launch,
                    **sections,
                },
            )
        )

    return write


@pytest.mark.parametrize(
    ("mpi", "sections"),
    [
        pytest.param("openmpi4", {}, id="sockets"),
        *(pytest.param(mpi, TORCH, id=mpi, marks=pytest.mark.campaign) for mpi in NAMES),
    ],
)
def test_a_drained_job_has_saved_on_two_nodes(tmp_path, ask, job, mpi, sections):
    programs = programs_of(mpi)
    job_id = ask("submit", job(**sections), programs=programs).stdout.strip()
    wait_for_ranks(tmp_path)
    status = json.loads(ask("status", job_id, "--json", programs=programs).stdout)
    ask("drain", job_id, programs=programs)
    done = ask("wait", job_id, check=False, programs=programs)

    assert status["state"] == "running"
    assert done.returncode == 75, done.stdout + done.stderr + ask("logs", job_id).stdout[-3000:]
    assert "everything is saved at step" in ask("status", job_id, check=False).stdout
    assert list_checkpoints(tmp_path / "runs" / "slow" / "checkpoints")


@pytest.mark.campaign
def test_a_cancelled_job_has_saved(tmp_path, ask, job):
    job_id = ask("submit", job(**TORCH)).stdout.strip()
    wait_for_ranks(tmp_path)
    ask("cancel", job_id)

    assert ask("wait", job_id, check=False).returncode == 143
    assert list_checkpoints(tmp_path / "runs" / "slow" / "checkpoints")


def test_a_job_that_waits_leaves_the_queue_when_it_is_cancelled(ask, job, dialect):
    job_id = ask("submit", job(dialect.held)).stdout.strip()
    status = ask("status", job_id).stdout
    ask("cancel", job_id)

    assert f"in {dialect.name}'s queue: {dialect.is_held}" in status
    assert ask("wait", job_id, check=False).stdout.startswith(f"{job_id}: cancelled")


@pytest.mark.campaign
def test_a_job_whose_time_is_over_saves_goes_on_in_another_and_ends_as_if_undisturbed(
    tmp_path, ask, job, name, dialect
):
    train = {"epochs": 6, "batch_size_per_rank": 4}
    checkpoint = {"every": None, "keep_last": 1}
    parts = {"train": train, "checkpoint": checkpoint, **TORCH}
    ask("run", job(called="undisturbed", **parts), "--set", "task_args.pause_s=0.0")
    job_id = ask("submit", job(dialect.time_limit, **parts), "--set", "task_args.pause_s=1.3").stdout.strip()
    first = json.loads(next((tmp_path / "state").rglob(f"{job_id}.json")).read_text())["native_id"]
    done = ask("wait", job_id, check=False)
    last = (tmp_path / "runs" / "slow" / job_id.removeprefix("slow-") / f"{name}-job-id").read_text().strip()

    assert done.returncode == 0, ask("logs", job_id).stdout[-3000:]
    assert first != last
    assert "resumed from" in ask("logs", job_id).stdout
    assert parameters(tmp_path, "slow") == parameters(tmp_path, "undisturbed")


def parameters(folder, job):
    """Parameters and state of the optimizer; each save averages the statistics of batch normalization."""
    found = arrays(newest(folder, job))
    return {name: data for name, data in found.items() if ".running_" not in name}


def test_what_it_refuses_is_told_in_its_own_words(ask, job, dialect):
    refused = ask("submit", job(dialect.unknown_queue), check=False)

    assert refused.returncode == 1
    assert dialect.refusal in refused.stderr


def test_outside_of_a_job_there_is_no_allocation(ask, job, name, dialect):
    done = ask("run", job(), "--launcher", f"{name}-allocation", check=False)

    assert done.returncode == 1
    assert f"has no {dialect.name} allocation" in done.stderr
