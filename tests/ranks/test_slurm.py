"""A real Slurm with two nodes: jobs that wait, train, are cancelled, run out of time and go on."""

from __future__ import annotations

import json
import time

import pytest
from support.cluster import cluster
from support.launching import BIN, PROGRAMS, mostly, write_job
from support.mpis import programs_of
from support.service import SUBMIT, Service
from support.slurm import slurm_on
from support.waiting import wait_for_ranks

from horovod_train.checkpoint.store import list_checkpoints, read_checkpoint

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster"), ("node1", "node2")) as hosts, slurm_on(hosts) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_runs_afterwards(slurm):
    yield
    deadline = time.monotonic() + 20
    while (left := still_there(slurm)) and time.monotonic() < deadline:
        time.sleep(0.1)
    slurm.ask("scancel", "--user=root")
    assert left == []


def still_there(slurm):
    ranks = [text for text in slurm.cluster.leftovers() if "horovod_train" in text]
    return ranks or slurm.ask("squeue", "-h", "-t", "R,PD").splitlines()


@pytest.fixture
def ask(slurm, tmp_path):
    return slurm.cluster.cli(tmp_path, slurm.variables)


def job(folder, controller, **sections):
    slurm = {"ranks_per_node": 1, **sections.pop("slurm", {})}
    launch = {"launcher": "slurm", "num_ranks": 2, "controller": controller, "slurm": slurm}
    return write_job(
        folder / "job.yaml",
        run_dir=str(folder / "runs"),
        **{
            "task": "digits",
            "train": {"epochs": 1},
            **sections,
            "launch": {**launch, **sections.get("launch", {})},
        },
    )


def slow(folder, controller, **sections):
    return job(
        folder,
        controller,
        framework="numpy",
        task=f"{PROGRAMS / 'quick_tasks.py'}:Noted",
        task_args={"notes": str(folder), "pause_s": 0.05},
        **{"train": {"epochs": 500, "batch_size_per_rank": 4}, **sections},
    )


@mostly("mpi")
def test_a_job_trains_on_two_nodes_while_run_follows_it(tmp_path, ask, controller):
    train = {"epochs": 3, "batch_size_per_rank": 4}
    done = ask("run", str(slow(tmp_path, controller, train=train)))

    assert "2 ranks" in done.stdout
    assert "trained test: 3 epochs" in done.stdout
    assert "succeeded" in done.stdout


STARTS = [
    ("openmpi4", "mpirun"), ("openmpi4", "srun"), ("openmpi5", "mpirun"), ("openmpi5", "srun"),
    ("mpich4", "mpirun"), ("mpich4", "srun"), ("mpich5", "mpirun"), ("mpich5", "srun"),
    ("intel", "mpirun"), ("intel", "srun"),
]  # fmt: skip
IN_EACH_RUN = [("openmpi5", "srun")]


@pytest.mark.parametrize(
    ("mpi", "start"),
    [pytest.param(*case, marks=() if case in IN_EACH_RUN else pytest.mark.campaign) for case in STARTS],
)
def test_each_mpi_library_starts_its_ranks_by_mpirun_and_by_srun_alone(tmp_path, ask, mpi, start):
    programs = programs_of(mpi)
    torch = {"task": f"{PROGRAMS / 'tasks.py'}:Noted", "task_args": {"notes": str(tmp_path), "pause_s": 0.05}}
    train = {"epochs": 500, "batch_size_per_rank": 4}
    path = job(tmp_path, "mpi", slurm={"mpi": start}, train=train, **torch)

    job_id = ask("submit", str(path), programs=programs).stdout.strip()
    wait_for_ranks(tmp_path)
    ask("drain", job_id, programs=programs)
    done = ask("wait", job_id, check=False, programs=programs)

    assert done.returncode == 75, done.stdout + done.stderr
    assert "everything is saved at step" in ask("status", job_id, check=False, programs=programs).stdout
    assert {int(file.stem.split("-")[1]) for file in tmp_path.glob("rank-*.txt")} == {0, 1}


ALONE = pytest.mark.parametrize("mpi", ["openmpi5", "mpich5"])
"""Their ranks are started by srun alone: through PMIx, and through PMI-2."""


def alone(folder, **sections):
    """A job of PyTorch whose ranks are started by srun alone."""
    torch = {"task": f"{PROGRAMS / 'tasks.py'}:Noted", "task_args": {"notes": str(folder), "pause_s": 0.1}}
    checkpoint = {"every": None, "keep_last": 1}
    slurm = {"mpi": "srun", **sections.pop("slurm", {})}
    return job(folder, "mpi", slurm=slurm, checkpoint=checkpoint, **{**torch, **sections})


@pytest.mark.campaign
@ALONE
def test_a_job_started_by_srun_alone_is_cancelled_and_has_saved(tmp_path, ask, mpi):
    programs = programs_of(mpi)
    path = alone(tmp_path, train={"epochs": 500, "batch_size_per_rank": 4})
    job_id = ask("submit", str(path), programs=programs).stdout.strip()
    wait_for_ranks(tmp_path)
    ask("cancel", job_id, programs=programs)

    assert ask("wait", job_id, check=False, programs=programs).returncode == 143
    assert list_checkpoints(tmp_path / "runs" / "test" / "checkpoints")


@pytest.mark.campaign
@ALONE
def test_a_job_started_by_srun_alone_is_requeued_when_its_time_is_over(tmp_path, ask, slurm, mpi):
    programs = programs_of(mpi)
    path = alone(tmp_path, train={"epochs": 12, "batch_size_per_rank": 4})
    job_id = ask("submit", str(path), programs=programs).stdout.strip()
    wait_for_ranks(tmp_path)
    time_is_over(slurm, native_id(tmp_path, job_id))
    waited = ask("wait", job_id, check=False, programs=programs)

    assert waited.returncode == 0, ask("logs", job_id).stdout[-3000:]
    assert "resumed from" in ask("logs", job_id).stdout


def native_id(folder, job_id):
    return json.loads(next((folder / "state").rglob(f"{job_id}.json")).read_text())["native_id"]


def time_is_over(slurm, number):
    """Do what Slurm does when the time of a job is nearly over, and start the requeued job at once."""
    slurm.ask("scancel", "--batch", "--signal=USR1", number)
    deadline = time.monotonic() + 30
    while "Restarts=1" not in slurm.ask("scontrol", "show", "job", number):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    # Slurm lets two minutes pass. Started in the second in which it was put back, a job is refused by
    # the nodes: "Job credential revoked".
    time.sleep(2)
    slurm.ask("scontrol", "update", f"JobId={number}", "StartTime=now")


@mostly("gloo")
def test_a_submitted_job_is_listed_followed_cancelled_and_has_saved(tmp_path, ask, controller):
    job_id = ask("submit", str(slow(tmp_path, controller))).stdout.strip()
    wait_for_ranks(tmp_path)
    listed = ask("list").stdout
    status = json.loads(ask("status", job_id, "--json").stdout)
    log = ask("logs", job_id).stdout
    cancelled = ask("cancel", job_id).stdout
    waited = ask("wait", job_id, check=False)

    assert job_id in listed
    assert status["state"] == "running"
    assert "on 2 ranks" in log
    assert "everything is saved at step" in cancelled
    assert waited.stdout.startswith(f"{job_id}: cancelled")
    assert waited.returncode == 143
    assert list_checkpoints(tmp_path / "runs" / "test" / "checkpoints")


@pytest.mark.parametrize("through", ["a server", pytest.param("this host", marks=pytest.mark.campaign)])
def test_every_verb_of_the_client(tmp_path, slurm, through):
    path = slow(tmp_path, "gloo")
    variables = {**slurm.variables, "XDG_STATE_HOME": str(tmp_path / "state")}
    service = Service(tmp_path, slurm.cluster.command(), variables)
    try:
        server = (service.url, SUBMIT) if through == "a server" else ()
        program = (str(BIN / "python"), str(PROGRAMS / "every_verb.py"))
        done = slurm.cluster.on_login(*program, str(path), *server, cwd=tmp_path, env=variables)
    finally:
        service.end()

    assert done.returncode == 0, done.stderr
    assert "launcher slurm" in done.stdout


@pytest.mark.campaign
@pytest.mark.parametrize("time_of_asking", range(20))
def test_a_job_that_is_asked_to_leave_has_saved_each_time(tmp_path, ask, controller, time_of_asking):
    path = slow(tmp_path, controller, launch={"grace_s": 10.0})
    job_id = ask("submit", str(path)).stdout.strip()
    wait_for_ranks(tmp_path)
    time.sleep(0.07 * time_of_asking)

    ask("drain", job_id)

    assert ask("wait", job_id, check=False).returncode == 75
    assert list_checkpoints(tmp_path / "runs" / "test" / "checkpoints")


def test_slurm_that_does_not_answer_is_no_reason_to_give_up_a_job(tmp_path, ask, slurm):
    job_id = ask("submit", str(slow(tmp_path, "mpi"))).stdout.strip()
    wait_for_ranks(tmp_path)
    config = slurm.folder / "slurm.conf"
    text = config.read_text()
    config.write_text(f"MessageTimeout=2\nSlurmctldPort=9\n{text}")
    status = ask("status", job_id, check=False)
    cancelled = ask("cancel", job_id, check=False)
    config.write_text(text)
    afterwards = json.loads(ask("status", job_id, "--json").stdout)
    ask("cancel", job_id)

    assert (status.returncode, cancelled.returncode) == (1, 1)
    assert "scontrol: " in status.stderr
    assert afterwards["state"] == "running"


def test_a_job_that_waits_in_the_queue_is_taken_out_of_it(tmp_path, ask, slurm):
    job_id = ask(
        "submit", str(slow(tmp_path, "mpi", slurm={"options": {"begin": "now+1hour"}}))
    ).stdout.strip()
    status = ask("status", job_id).stdout
    ask("cancel", job_id)
    after = json.loads(ask("status", job_id, "--json").stdout)

    assert "queued" in status
    assert "in Slurm's queue: BeginTime" in status
    assert after["state"] == "cancelled"


def test_a_job_whose_time_is_over_saves_is_queued_again_and_ends_as_if_undisturbed(tmp_path, ask, slurm):
    train = {"epochs": 12, "batch_size_per_rank": 4}
    checkpoint = {"every": None, "keep_last": 1}
    path = slow(tmp_path, "mpi", train=train, checkpoint=checkpoint)
    reference = ask("run", str(path), "--set", "name=undisturbed", "--set", "task_args.pause_s=0.0")
    job_id = ask("submit", str(path)).stdout.strip()
    wait_for_ranks(tmp_path, 4)
    time_is_over(slurm, native_id(tmp_path, job_id))
    waited = ask("wait", job_id, check=False)

    assert "succeeded" in reference.stdout
    assert waited.returncode == 0, ask("logs", job_id).stdout[-3000:]
    assert "resumed from" in ask("logs", job_id).stdout
    assert weights(tmp_path, "test") == weights(tmp_path, "undisturbed")


def weights(folder, name):
    path = list_checkpoints(folder / "runs" / name / "checkpoints")[0].path
    return {name: bytes(blob.data) for name, blob in read_checkpoint(path).arrays["model"].items()}


def test_what_slurm_refuses_is_told_in_its_own_words(tmp_path, ask):
    done = ask("submit", str(job(tmp_path, "mpi", slurm={"options": {"partition": "gpu"}})), check=False)

    assert done.returncode == 1
    assert "invalid partition specified: gpu" in done.stderr


def test_outside_an_allocation_there_is_none(tmp_path, ask):
    path = job(tmp_path, "mpi", launch={"launcher": "slurm-allocation"})

    done = ask("run", str(path), check=False)

    assert done.returncode == 1
    assert "has no Slurm allocation" in done.stderr
